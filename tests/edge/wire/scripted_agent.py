"""A server whose model works on a task as an agent's does: it reads a file, mends it, runs its test
and says so. Only the choice of tokens is scripted: tokenizer, chat template, format of calls,
grammar, cache and HTTP are those that serve.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tangram.engine.text.codec import TextCodec
from tangram.link.linked_engine import LinkedEngine
from tangram.serve.http import build_app, transport_options
from tangram.watch import News, Readings, SequenceReading, SequenceState
from tests.real_templates import real_template
from tests.real_tokenizers import add_tokenizer
from tests.running import run_app

from .scripted import ScriptedHead, scripted_engine
from .tiny import TinyServer, tiny_folder

TASK = "Mend sum.py: its test fails."
WRONG, RIGHT = "    return a - b\n", "    return a + b\n"
FILES = {
    "sum.py": f"def add(a, b):\n{WRONG}",
    "test_sum.py": "from sum import add\n\nassert add(2, 2) == 4\nprint('passed: ' + 'ok' * 2)\n",
}
PASSED, DONE, ASIDE = "passed: okok", "add() adds now, and its test passes.", "A sum"
ENDLESS, WORD = "Talk without an end.", " on and"


@dataclass(frozen=True)
class ScriptedTurn:
    """What the model says: words, then perhaps calls as (name, arguments)."""

    text: str
    calls: Sequence[tuple[str, Mapping[str, Any]]] = ()

    def write(self) -> str:
        """As Qwen3 writes it."""
        calls = (json.dumps({"name": name, "arguments": given}) for name, given in self.calls)
        return "\n".join([self.text, *(f"<tool_call>\n{call}\n</tool_call>" for call in calls)])


@dataclass
class ScriptedAgent:
    """Has a model say the first of the `turns` of `TASK` whose text is not in the prompt yet.

    Prompts without the task or without the `sign` of a turn, such as that for a title, are told
    `ASIDE`; those with `ENDLESS` come to no end. `served` are the turns that have ended.
    """

    codec: TextCodec
    head: ScriptedHead
    turns: Sequence[ScriptedTurn] = ()
    sign: str = "<tools>"
    served: list[SequenceReading] = field(default_factory=list)

    def observe(self, news: News, readings: Readings) -> None:
        """See `Observer`."""
        for change in news.changes:
            if change.state is SequenceState.RUNNING:
                self._answer(self.prompt(change.reading))
            elif change.state is SequenceState.ENDED and self._is_turn(self.prompt(change.reading)):
                self.served.append(change.reading)

    def prompt(self, reading: SequenceReading) -> str:
        """The prompt of a request, as text."""
        prompt = reading.tokens[: reading.usage.prompt_tokens]
        text: str = self.codec.tokenizer.decode(prompt)
        return text

    def _is_turn(self, prompt: str) -> bool:
        return TASK in prompt and self.sign in prompt

    def _answer(self, prompt: str) -> None:
        if ENDLESS in prompt:
            said = WORD * 8000
        elif self._is_turn(prompt):
            unsaid = (turn for turn in self.turns if turn.text not in prompt)
            said = next(unsaid, self.turns[-1]).write()
        else:
            said = ASIDE
        tokens = self.codec.tokenizer.encode(said, add_special_tokens=False)
        self.head.script([*tokens, min(self.codec.eos_token_ids)])


@dataclass(frozen=True)
class HttpExchange:
    """A request of a program, and the status of its answer."""

    method: str
    path: str
    body: bytes
    status: int


@dataclass
class RecordedHttp:
    """Passes requests on to `app` and records them."""

    app: Any
    exchanges: list[HttpExchange] = field(default_factory=list)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        body, status = bytearray(), 0

        async def read() -> Any:
            message = await receive()
            body.extend(message.get("body", b""))
            return message

        async def write(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self.app(scope, read, write)
        finally:
            made = HttpExchange(scope["method"], scope["path"], bytes(body), status)
            self.exchanges.append(made)


@dataclass
class AgentServer(TinyServer):
    """A server for programs, its model, and what they asked."""

    agent: ScriptedAgent
    http_record: RecordedHttp


@contextmanager
def run_agent_server(folder: Path, name: str) -> Iterator[AgentServer]:
    """The tokenizer and template of Qwen3 in `folder`; one request at a time."""
    add_tokenizer("qwen3", folder)
    (folder / "chat_template.jinja").write_text(real_template("qwen3"), encoding="utf-8")
    vocabulary = 151_936
    tiny_folder(folder, vocabulary, context_tokens=131_072)
    room = {"max_num_seqs": 1, "kv_cache_gib": 0.5, "chunk_tokens": 128}
    engine, head = scripted_engine(folder, vocabulary, max_num_batched_tokens=2048, **room)
    agent = ScriptedAgent(engine.codec, head)
    engine.watch(agent)
    record = RecordedHttp(build_app(LinkedEngine(engine), served_model_name=name))
    with run_app(record, **transport_options()) as running:
        yield AgentServer(running.url, engine, running.stop, agent, record)
