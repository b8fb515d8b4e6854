"""What clients of `bench.serving.compare --http` read of streams, and what is made of them."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from bench.serving.competitors import choose_plugin_options, choose_vllm_options
from bench.serving.servers import (
    KINDS,
    describe_costs,
    read_tokens,
    spell_command,
    spell_options,
    time_answer,
)
from bench.serving.streams import ClientCost, StreamedAnswer, read_completion, read_events
from tangram.compress.library import find_shipped_profiles
from tangram_lab.load.asks import Ask

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
USAGE = {"prompt_tokens": 3, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 2}}
ASK = Ask((7, 8, 9), 4, at_s=1.0)


def event(data: str) -> bytes:
    return f"data: {data}\n\n".encode()


def chunk(text: str, finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": finish_reason}
    return event(json.dumps({"choices": [choice], "usage": None}))


def usage(**changes: Any) -> bytes:
    return event(json.dumps({"choices": [], "usage": USAGE | changes}))


def piece(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


DONE, END = event("[DONE]"), piece(b"")
ANSWER = [chunk(" a"), chunk(" b 1f"), chunk(" 10", "length"), usage(), DONE]


def test_an_event_has_the_time_at_which_its_last_byte_came() -> None:
    whole = HEAD + b"".join(map(piece, (event("one"), event("two"), event("three")))) + END
    cut, end = whole.index(b"two") + 1, whole.index(b"three")
    parts = [(1.0, whole[:cut]), (2.0, whole[cut:end]), (3.0, whole[end:])]
    found = list(read_events(parts))
    assert [data for _, data in found] == [b"one", b"two", b"three"]
    assert [at_s for at_s, _ in found] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("size", [1, 7, 64, 10_000])
def test_an_answer_is_read_however_it_is_cut(size: int) -> None:
    whole = HEAD + b"".join(map(piece, ANSWER)) + END
    pieces = [(at / 1e3, whole[at : at + size]) for at in range(0, len(whole), size)]
    answer = read_completion(pieces)
    assert answer.texts == [" a", " b 1f", " 10"] and answer.times_s == sorted(answer.times_s)
    found = (answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens)
    assert (*found, answer.finish_reason) == (3, 4, 2, "length")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"".join(map(piece, ANSWER)), "ends with"),  # without the end of the answer
        (b"".join(map(piece, ANSWER[:-1])) + END, "usage"),
        (b"".join(map(piece, [*ANSWER[:-2], DONE])) + END, "usage"),
        (piece(event('{"error": {"message": "no memory"}}')) + piece(DONE) + END, "no memory"),
    ],
    ids=["cut off", "no DONE", "no usage", "an error"],
)
def test_an_answer_that_is_not_whole_is_refused(body: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_completion([(0.0, HEAD + body)])


def test_a_refusal_of_the_server_is_shown() -> None:
    body = b'{"error": "the queue is full"}'
    head = f"HTTP/1.1 429 Too Many\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    with pytest.raises(ValueError, match=r"status 429 .*the queue is full"):
        read_completion([(0.0, head + body)])


def make_stream(**changes: Any) -> StreamedAnswer:
    plain: dict[str, Any] = {
        "times_s": [2.0, 2.5, 4.0],
        "texts": [" a", " b 1f", " 10"],
        "finish_reason": "length",
        "prompt_tokens": 3,
        "completion_tokens": 4,
    }
    return StreamedAnswer(**(plain | changes))


def test_tokens_of_one_chunk_come_at_one_time() -> None:
    answer = time_answer(ASK, make_stream(cached_tokens=2))
    assert answer.token_ids == [0xA, 0xB, 0x1F, 0x10]
    assert answer.times_s == [2.0, 2.5, 2.5, 4.0]
    assert (answer.first_token_s, answer.per_token_s) == (1.0, pytest.approx(2 / 3))
    assert answer.cached_tokens == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"texts": [" a", " b", " 10"]},
        {"completion_tokens": 3},
        {"prompt_tokens": 4},
        {"finish_reason": "stop"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_an_answer_that_is_not_what_was_asked_for_ends_the_run(changes: dict[str, Any]) -> None:
    with pytest.raises(SystemExit, match="was asked for"):
        time_answer(ASK, make_stream(**changes))


def test_the_processors_time_is_divided_by_tokens_and_by_chunks() -> None:
    clients = [ClientCost(0.001, 2.0), ClientCost(0.002, 4.0)]
    costs = describe_costs({"engine": 1.0, "api": 0.004}, [make_stream(), make_stream()], clients)
    assert costs["api_us_a_token"] == pytest.approx(500.0)  # 4,000 µs, 8 tokens
    assert costs["client_us_a_chunk"] == pytest.approx(500.0)  # 3,000 µs, 6 chunks
    assert costs["busiest_client"] == pytest.approx(0.0005)
    assert costs["cpu_s"] == {"engine": 1.0, "api": 0.004}


def test_options_are_spelled_as_the_command_has_them() -> None:
    given = {"max_num_seqs": 4, "async_scheduling": False, "kv_offloading_size": None}
    assert spell_options(given) == ["--max-num-seqs", "4", "--no-async-scheduling"]
    assert spell_options({"enable_prefix_caching": True}) == ["--enable-prefix-caching"]


def test_the_plugin_is_started_with_budgets_that_ship(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TANGRAM_VLLM", "VLLM_USE_V2_MODEL_RUNNER"):
        monkeypatch.setenv(name, "")
    options = choose_vllm_options(40960) | choose_plugin_options(0.5, packs=False)
    command = " ".join(spell_options(options))
    for option in ("--attention-backend CUSTOM", "--block-size 512"):
        assert option in command
    assert "async" not in command
    wanted = json.loads(os.environ["TANGRAM_VLLM"])
    assert (find_shipped_profiles() / wanted["profile"]).is_file()
    packing = choose_plugin_options(1.0, packs=True)
    assert "--no-async-scheduling" in spell_options(packing)
    assert json.loads(os.environ["TANGRAM_VLLM"]) == {}


def test_the_servers_of_vllm_are_started_with_the_options_of_its_variants() -> None:
    options = choose_vllm_options(40960, 256, offload_gib=64, cache_dtype="fp8")
    given = spell_options(options | {KINDS["vllm"].processes: 4})
    command = " ".join(spell_command(KINDS["vllm"], "/model", given))
    assert " -m vllm.entrypoints.cli.main serve /model --served-model-name measured " in command
    for option in ("kv-offloading-size 64", "kv-cache-dtype fp8", "api-server-count 4"):
        assert f" --{option}" in command
    plain = " ".join(spell_options(choose_vllm_options(40960)))
    assert "offloading" not in plain and "--kv-cache-dtype auto" in plain


def test_words_are_tokens() -> None:
    assert read_tokens(" ff 0 1a") == [255, 0, 26]
