"""An engine without a model, so that the HTTP behaviour can be tested alone: one thread, one
character a token.

Its answer to a prompt is the prompt's last words reversed. Words in the prompt steer it: `silent`
never answers, `endless` never stops, `broken` gives up after two tokens.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from tangram.engine.text.codec import TokenText
from tangram.engine.text.grammar import GrammarCompiler
from tangram.errors import RequestError
from tangram.link.api_process import ApiStart
from tangram.link.api_processes import ApiProcesses
from tangram.link.engine_port import MOST_UNREAD_BYTES, EnginePort
from tangram.link.remote_engine import EngineNature
from tangram.link.supervisor import KILL_AFTER_S, Supervisor
from tangram.metrics import EngineStats, GroupOverflow, SpeculationStats
from tangram.serve.options import ServerOptions
from tangram.serve.transport.listening import Listener
from tangram.types import (
    OPENAI_SAMPLING,
    DraftedTokens,
    Event,
    FinishReason,
    Marks,
    Request,
    SamplingValues,
    ThinkingFormat,
    TokenLogprob,
    ToolFormat,
    Usage,
)
from tangram.web.access import Access
from tangram.web.desk import WebDesk

CONTEXT_TOKENS = 512
POOL_PAGES = 1000
PAGES_PER_REQUEST = 10


class FakeCodec:
    """Token ids are code points. `told` is what each conversation said to the chat template."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []

    longest_token_bytes = 4
    tool_format: ToolFormat | None = None
    thinking_format: ThinkingFormat | None = None
    marks: Marks = Marks()
    control_token_ids: Sequence[int] = ()
    template_options: frozenset[str] = frozenset()
    special_token_ids: frozenset[int] = frozenset()
    eos_token_ids: frozenset[int] = frozenset()

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(map(ord, text))

    def warm(self) -> None:
        """Nothing of it needs to be."""

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
    ) -> tuple[str, ...]:
        self.told.append(dict(options or {}))
        return tuple(f"<{message['role']}>{message['content']}" for message in messages)

    def encode_chat(self, parts: Iterable[str], salt: str = "") -> tuple[int, ...]:
        return self.encode("".join(parts))

    def close(self) -> None:
        """It has no processes."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))

    def verbatim(self, token_ids: Sequence[int], field: str) -> str:
        if not all(0 <= token < 0x110000 for token in token_ids):
            raise RequestError(f"{field} has a token that is no code point", field)
        return self.decode(token_ids)

    def token_text(self, token_id: int) -> TokenText:
        return TokenText(chr(token_id), chr(token_id).encode())


@dataclass(frozen=True)
class FakeGrammar:
    """It allows everything."""

    source: str
    field: str

    def begin(self) -> Any:
        """Nobody asks for it."""


@dataclass
class FakeGrammars:
    """Those of both ends of a link; `sources` are what it has compiled."""

    sources: list[tuple[str, str]] = field(default_factory=list)
    _known: dict[str, FakeGrammar] = field(default_factory=dict)
    most_trial_s: int = 2

    def warm(self) -> None:
        pass

    def look_up(self, source: str, name: str) -> Any:
        return self._known.get(source)

    def compile(self, source: str, name: str) -> Any:
        self.sources.append((source, name))
        return self._known.setdefault(source, FakeGrammar(source, name))

    def find_faults(self, sources: Sequence[str]) -> dict[int, str]:
        """As the real ones: that needs no model."""
        return GrammarCompiler(cast(Any, None), 0, ()).find_faults(sources)


@dataclass
class _Completion:
    request: Request
    index: int
    answer: str
    cached_tokens: int
    admitted_s: float
    sent: int = 0


@dataclass
class FakeEngine:
    """Gives every running completion one token a millisecond. `submitted` and `aborted` are its
    diary.
    """

    codec: FakeCodec = field(default_factory=FakeCodec)
    grammars: FakeGrammars = field(default_factory=FakeGrammars)
    max_model_len: int = CONTEXT_TOKENS
    sampling: SamplingValues = OPENAI_SAMPLING
    vocab_size: int = 0x110000
    most_completions: int | None = None
    healthy: bool = True
    submitted: list[Request] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    stopped: bool = False
    waiting: int = 0
    steps: int = 13
    drafted: DraftedTokens | None = None  # for each completion

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._running: list[_Completion] = []
        self._seen: list[tuple[int, ...]] = []
        self._generated_tokens = 0
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._tells: list[Callable[[], None]] = []

    def follow(self, tell: Callable[[], None]) -> None:
        self._tells.append(tell)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self.stopped = True
        self._thread.join()
        running, self._running = self._running, []
        for job in running:
            self._emit(job, "", FinishReason.ABORT)

    def submit(self, *requests: Request) -> None:
        for request in requests:
            self._check(request)
        with self._lock:
            for request in requests:
                self._take(request)

    def check_queue(self, coming: int) -> None:
        """Its queue has no bound."""

    def _check(self, request: Request) -> None:
        if request.kv_retention is not None and not 0 < request.kv_retention <= 1:
            raise RequestError(
                f"kv_retention is {request.kv_retention}, it must lie in (0, 1]", "kv_retention"
            )
        needed = len(request.prompt_token_ids) + (request.sampling.max_tokens or 0)
        if needed > CONTEXT_TOKENS:
            raise RequestError(
                f"the request needs {needed} tokens, the context has {CONTEXT_TOKENS}", "max_tokens"
            )

    def _take(self, request: Request) -> None:
        prompt = request.prompt_token_ids
        cached = max((_count_shared(prompt, seen) for seen in self._seen), default=0)
        answer = "".join(reversed("".join(map(chr, prompt)).split("<assistant>")[-1][-60:]))
        now_s = time.monotonic()
        self._running += [
            _Completion(request, index, answer, cached, now_s)
            for index in range(request.sampling.n)
        ]
        self._seen.append(prompt)
        self.submitted.append(request)

    def abort(self, request_id: str) -> None:
        with self._lock:
            self.aborted.append(request_id)
            self._running = [job for job in self._running if job.request.request_id != request_id]

    def die(self) -> None:
        """Stop answering without a word, as a crashed engine thread does."""
        self.healthy = False
        with self._lock:
            self._running.clear()

    def stats(self) -> EngineStats:
        with self._lock:
            held, queued = PAGES_PER_REQUEST * len(self._running), self.waiting
            return EngineStats(
                running=len(self._running),
                waiting=queued,
                pages_total=POOL_PAGES,
                pages_held=held,
                pages_cached=7,
                pages_free=POOL_PAGES - held - 7,
                chunk_tokens=512,
                capacity_tokens=2000,
                capacity_uncompressed_tokens=1000,
                cache_dtype="float32",
                page_bytes=64,
                kv_token_bytes=8,
                kv_bytes_held=80,
                kv_bytes_uncompressed=160,
                prompt_tokens=11,
                cached_tokens=5,
                computed_prompt_tokens=6,
                generated_tokens=self._generated_tokens,
                preemptions=3,
                steps=self.steps,
                sealed_chunks=2,
                host_pages_total=50,
                host_page_bytes=64,
                host_pages_used=20,
                restored_tokens=4,
                host_bytes_out=640,
                host_bytes_in=320,
                dropped_spans=6,
                pages_promised=12,
                slots_held=640,
                slots_used=600,
                step_s=4.0,
                device_s=3.0,
                sealing_s=0.5,
                lost_diverged=70,
                lost_evicted=30,
                lost_stateless=0,
                plans={"aot": 9},
                overflow=(GroupOverflow(0.5, "keydiff", 0, 2, 100, 10, 3),),
                speculation=SpeculationStats(8, 30, 21, (12, 9)),
            )

    def _loop(self) -> None:
        while not self.stopped:
            time.sleep(0.001)
            with self._lock:
                self._running = [job for job in self._running if not self._advance(job)]
            for tell in self._tells:
                tell()

    def _advance(self, job: _Completion) -> bool:
        """Give one token; True when the completion has ended."""
        prompt = "".join(map(chr, job.request.prompt_token_ids))
        if "silent" in prompt:
            return False
        if "broken" in prompt and job.sent == 2:
            self._emit(job, "", FinishReason.ABORT, error="the pages caught fire")
            return True
        character = job.answer[job.sent % len(job.answer)]
        job.sent += 1
        self._generated_tokens += 1
        reason = None
        if job.sent == job.request.sampling.max_tokens:
            reason = FinishReason.LENGTH
        elif job.sent == len(job.answer) and "endless" not in prompt:
            reason = FinishReason.STOP
        self._emit(job, character, reason)
        return reason is not None

    def _emit(
        self, job: _Completion, text: str, reason: FinishReason | None, error: str | None = None
    ) -> None:
        request, ids = job.request, self.codec.encode(text)
        prompt_tokens = len(request.prompt_token_ids)
        tokens = prompt_tokens + job.sent
        usage = Usage(
            prompt_tokens, job.sent, job.cached_tokens, 4 * tokens, 8 * tokens, self.drafted
        )
        top = tuple((ord(letter), -float(rank)) for rank, letter in enumerate("xyz"))[
            : request.sampling.logprobs
        ]
        logprobs = tuple(
            TokenLogprob(token, -math.inf if token == ord("!") else -0.5, top) for token in ids
        )
        wanted = logprobs if request.sampling.logprobs is not None else ()
        request.on_event(
            Event(request.request_id, job.index, ids, wanted, usage, reason, error, job.admitted_s)
        )


def _count_shared(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common prefix, never the whole of `left`: the last token must be computed."""
    common = next(
        (at for at, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]),
        len(right),
    )
    return min(common, len(left) - 1)


def serve_fake(
    engine: Any,
    port: int,
    shutdown_grace_s: float = 0.5,
    page: Access | None = None,
    api_processes: int = 1,
    kill_after_s: float = KILL_AFTER_S,
    most_unread_bytes: int = MOST_UNREAD_BYTES,
) -> None:
    """Serve `engine` on this machine until a signal, as `tangram serve` serves a real one.

    With `page` it is an `ObservedFakeEngine`.
    """
    listener = Listener.at("127.0.0.1", port)
    options = ServerOptions(shutdown_grace_s=shutdown_grace_s)
    start = ApiStart(EngineNature.of(engine), "fake-model", options, None, page)
    desk = None if page is None else WebDesk(engine, "fake-model")
    with ApiProcesses(listener, api_processes) as processes:
        port_of_engine = EnginePort(engine, desk, most_unread_bytes=most_unread_bytes)
        supervisor = Supervisor(port_of_engine, start, processes, lambda: None, kill_after_s)
        asyncio.run(supervisor.run())
