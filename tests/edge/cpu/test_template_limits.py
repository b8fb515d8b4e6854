"""What a chat template may take of time and memory: nobody else may notice that it takes more."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from bench.bare_tokenizer import load_tokenizer
from tangram.engine.text.codec import TextCodec
from tangram.errors import MachineError, RequestError
from tests.mentions import mentioning
from tests.templates import HERMES, QWEN3

USER = [{"role": "user", "content": "hi"}]
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
# Python computes constants while it compiles a template.
POWER = "{{ 7 ** (7 ** 9) }}"
LARGE = (
    "{{ 'a' * 10 ** 10 }}",
    "{{ 'a' | center(10 ** 10) }}",
    "{{ '%999999999d' | format(1) }}",
    "{{ ['a'] * 10 ** 9 }}",
    "{{ messages | tojson(indent=10 ** 9) }}",
    "{% set n = namespace(a='x') %}{% for i in range(40) %}{% set n.a = n.a + n.a %}{% endfor %}",
    "{{ 'x'.join(['a' * 1000000] * 100) }}",  # as much as memory holds, and more than a prompt
)


def codec_of(template: str) -> TextCodec:
    tokenizer = load_tokenizer("smollm2")
    tokenizer.chat_template = template
    return TextCodec(tokenizer)


def find_processes() -> list[int]:
    """The processes in which this one renders templates."""
    listed = [path.read_text().split() for path in Path("/proc/self/task").glob("*/children")]
    children = {int(pid) for pids in listed for pid in pids}
    return [
        pid
        for pid in sorted(children)
        if b"template_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def find_busy() -> list[int]:
    """Those that compute; the others wait for work."""
    states = {pid: Path(f"/proc/{pid}/stat").read_text() for pid in find_processes()}
    return [pid for pid, stat in states.items() if stat.rpartition(")")[2].split()[0] != "S"]


def await_readiness(codec: TextCodec) -> None:
    """Both processes wait for work."""
    codec.warm()
    while find_busy():
        pass


@pytest.fixture(scope="module")
def shared() -> Iterator[TextCodec]:
    codec = codec_of(QWEN3)
    yield codec
    codec.close()


@pytest.fixture
def codec(shared: TextCodec) -> TextCodec:
    """Its processes may be those of the test before."""
    shared.tokenizer.chat_template = QWEN3
    return shared


@pytest.mark.parametrize("work", [ENDLESS, "{{ (messages | length + 6) ** (7 ** 9) }}"])
def test_what_never_ends_is_ended_and_another_conversation_does_not_wait(
    codec: TextCodec, work: str
) -> None:
    codec.tokenizer.chat_template = (
        f"{{% if messages[0].content == 'work' %}}{work}{{% endif %}}{{{{ messages[0].content }}}}"
    )
    await_readiness(codec)
    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(codec.chat_prompt, [{"role": "user", "content": "work"}])
        while not find_busy():
            pass
        assert codec.decode(codec.chat_prompt(USER)) == "hi"
        assert not working.done()
        with pytest.raises(RequestError, match=mentioning("template 5 1024")) as told:
            working.result()
    assert told.value.field == "messages"
    assert codec.decode(codec.chat_prompt(USER)) == "hi"


@pytest.mark.parametrize("template", LARGE)
def test_what_fills_the_memory_is_ended(codec: TextCodec, template: str) -> None:
    codec.tokenizer.chat_template = template
    with pytest.raises(RequestError, match=mentioning("template 5 1024")):
        codec.chat_prompt(USER)
    codec.tokenizer.chat_template = HERMES
    assert codec.chat_prompt(USER)


def test_a_model_whose_template_never_ends_is_found_out_by_one_example() -> None:
    codec = codec_of(POWER)
    codec.warm()
    assert (codec.tool_format, codec.thinking_format) == (None, None)
    assert codec.template_options == frozenset()
    codec.close()


def test_a_long_conversation_with_tools_is_what_transformers_renders(codec: TextCodec) -> None:
    turns = [
        {"role": ("user", "assistant")[at % 2], "content": f"turn {at} " * 40} for at in range(4096)
    ]
    parameters = {"type": "object", "properties": {f"p{at}": {"type": "string"} for at in range(9)}}
    tools = [
        {"type": "function", "function": {"name": f"f{at}", "parameters": parameters}}
        for at in range(128)
    ]
    rendered = codec.tokenizer.apply_chat_template(
        turns, tools=tools, add_generation_prompt=True, tokenize=False, enable_thinking=False
    )
    assert "".join(codec.render_chat(turns, tools, {"enable_thinking": False})) == rendered


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_is_ended_from_outside_loses_no_later_conversation(
    codec: TextCodec, number: signal.Signals
) -> None:
    expected = codec.chat_prompt(USER)
    for pid in find_processes():
        os.kill(pid, number)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert codec.chat_prompt(USER) == expected


def test_one_that_is_ended_while_it_renders_is_no_fault_of_the_conversation(
    codec: TextCodec,
) -> None:
    await_readiness(codec)
    codec.tokenizer.chat_template = ENDLESS
    with ThreadPoolExecutor(1) as pool:
        rendering = pool.submit(codec.chat_prompt, USER)
        while not (busy := find_busy()):
            pass
        os.kill(busy[0], signal.SIGKILL)
        with pytest.raises(MachineError, match=mentioning("again")):
            rendering.result()


def test_it_has_no_file_of_the_server_and_ends_with_its_codec() -> None:
    codec = codec_of(QWEN3)
    before = set(find_processes())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.set_inheritable(True)
        codec.warm()
    started = set(find_processes()) - before
    assert len(started) == 2
    for pid in started:
        opened = []
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # the process has closed it since
                opened.append(str(path.readlink()))
        assert opened and not any(name.startswith("socket:") for name in opened)
    del codec
    assert not started & set(find_processes())


def test_what_json_cannot_spell_is_named(codec: TextCodec) -> None:
    with pytest.raises(RequestError, match="JSON"):
        codec.chat_prompt([{"role": "user", "content": object()}])
