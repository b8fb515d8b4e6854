"""One HTTP request's walk: body → prompt tokens → engine → reply, whole or streamed."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from tangram.errors import RequestError
from tangram.serve.body import texts_in
from tangram.serve.bridge import EventStream, Job, Limits, ServedEngine
from tangram.serve.calls import ToolChatFormat
from tangram.serve.errors import ApiError
from tangram.serve.exposition import ServerMetrics
from tangram.serve.preparation import Preparation, unless_disconnected
from tangram.serve.record import Record, record_of
from tangram.serve.replies import ChatFormat, Choice, CompletionFormat, Format, Json, refuse_huge, usage_json
from tangram.serve.schema import ChatRequest, CompletionRequest, StreamOptions
from tangram.serve.sending import EventSource
from tangram.serve.template import FIELD, Template
from tangram.serve.unknown import IgnoredFields
from tangram.types import Grammar, Usage

# A step takes seconds at most; the first may compile. Beyond this its device hangs.
MOST_STEP_S = 600
# So long is the step under way waited for when the server ends.
LAST_STEP_S = 30
_log = logging.getLogger(__name__)
# What the engine needs of a request: how its answer is written, the prompts, and what an answer must be like.
_Parts = tuple[Format, list[tuple[int, ...]], Grammar | None]
_NO_TOOLS = (
    "the chat template of this model shows it no tools, or has calls written in a form that this server cannot read: "
    "leave them out, or choose another model"
)


class Service:
    """Answers both completion endpoints for one engine and one model name. With `let_by`, fields that
    are not served are `ignored`, and counted, instead of refused.
    """

    def __init__(
        self, engine: ServedEngine, served_model_name: str, limits: Limits | None = None, let_by: bool = False
    ) -> None:
        self.model = served_model_name
        self.created_s = int(time.time())
        self.metrics = ServerMetrics(engine.stats)
        self.ignored = IgnoredFields(self.metrics.ignored_fields) if let_by else None
        self.template = Template(engine.codec, self.ignored)
        self.draining = False
        self._engine, self._limits, self._started = engine, limits or Limits(), False
        self._hangs = False
        self._stopping: threading.Thread | None = None
        self.preparation = Preparation(engine, self._limits)

    @property
    def healthy(self) -> bool:
        """Whether the engine can still answer: its thread lives, and its step has not taken ten minutes."""
        return self._engine.healthy and not self._hangs

    @property
    def ready(self) -> bool:
        """Whether new requests should come here: the engine runs, and the server is not about to end."""
        return self._started and self.healthy and not self.draining

    @property
    def max_model_len(self) -> int:
        """The most tokens, prompt and answer, of one sequence."""
        return self._engine.max_model_len

    def start(self) -> None:
        """Start the engine's thread."""
        self._engine.grammars.warm()
        self._engine.start()
        self._started = True

    def drain(self) -> None:
        """Take no new requests; those that are here go on."""
        self.draining = True

    async def watch(self) -> None:
        """Until it is cancelled: see whether steps end while something runs."""
        steps, since_s = None, 0.0
        while True:
            stats, now_s = self._engine.stats(), time.monotonic()
            if stats.steps != steps or stats.running == 0:
                steps, since_s = stats.steps, now_s
            hangs = now_s - since_s > MOST_STEP_S
            if hangs and not self._hangs:
                _log.error("a step of the engine has not ended for %.0f s: the server is not healthy", now_s - since_s)
            self._hangs = hangs
            await asyncio.sleep(MOST_STEP_S / 60)

    def stop(self) -> None:
        """End the engine's thread; what still runs is aborted. A step that does not end is left, see `stuck`."""
        self.preparation.stop()
        if self._stopping is None:
            # A thread that would not keep the process, as those of a pool do.
            self._stopping = threading.Thread(target=self._engine.stop, name="engine-stop", daemon=True)
            self._stopping.start()
        self._stopping.join(LAST_STEP_S)

    @property
    def stuck(self) -> bool:
        """Whether `stop` has not ended the engine's thread."""
        return self._stopping is not None and self._stopping.is_alive()

    def check_model(self, model: str) -> None:
        """Raise `ApiError` 404 unless `model` is the served one."""
        if model != self.model:
            message = f"the model {model!r} does not exist: this server serves {self.model!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def answer(self, body: ChatRequest | CompletionRequest, request: Request) -> Response:
        """POST /v1/chat/completions and /v1/completions."""
        parts = await self.preparation.of(request, self._parts, body)
        events, style, job, head = self._begin(body, parts, record_of(request))
        if body.stream:
            head |= {"object": style.chunk_object}
            return EventSource(_frames(events, head, style, job.sampling.n, body.stream_options), events)
        try:
            found = await unless_disconnected(request, _finished(events, style, job, head))
            return await asyncio.to_thread(JSONResponse, found)
        finally:
            events.close()  # also if the work was given up before it began

    async def whole(self, body: ChatRequest | CompletionRequest) -> Json:
        """The answer in one piece, for a caller that does not hang up."""
        return await _finished(*self._begin(body, await self._parts(body)))

    async def _parts(self, body: ChatRequest | CompletionRequest) -> _Parts:
        style: Format
        grammar = await self._grammar(body)
        if isinstance(body, ChatRequest):
            tools = [tool.for_template() for tool in body.tools if body.tool_choice != "none"]
            messages = [message.for_template() for message in body.messages]
            options = self.template.told(body.chat_template_kwargs, body.reasoning_effort, body.verbosity)
            prompts = [await self.chat_prompt(messages, "messages", tools, options)]
            style = self._chat_format(body)
        else:
            prompts = [await self.text_prompt(p) if isinstance(p, str) else tuple(p) for p in body.prompt]
            if not all(prompts):
                raise ApiError(400, "prompt holds no tokens: send at least one", param="prompt", code="invalid_value")
            style = await self._completion_format(body)
        return style, prompts, grammar

    def _begin(
        self, body: ChatRequest | CompletionRequest, parts: _Parts, record: Record | None = None
    ) -> tuple[EventStream, Format, Job, Json]:
        style, prompts, grammar = parts
        identity = f"{style.id_prefix}-{uuid.uuid4().hex}"
        try:
            job = Job(
                identity, prompts, body.sampling(), body.kv_retention, body.cache_salt, body.stream, grammar, record
            )
            head: Json = {"id": identity, "created": int(time.time()), "model": self.model}
            if isinstance(body, ChatRequest) and body.service_tier is not None:
                head["service_tier"] = "default"
            return self.open(job), style, job, head
        except RequestError as error:
            if not isinstance(body, ChatRequest):
                raise
            raise _as_chat(error, body) from error

    async def _grammar(self, body: ChatRequest | CompletionRequest) -> Grammar | None:
        """What the answer must be like, compiled on a thread of its own; None if it may be anything."""
        codec = self._engine.codec
        if isinstance(body, ChatRequest) and body.tools and codec.tool_format is None:
            raise RequestError(f"tools: {_NO_TOOLS}", "tools")
        found = body.grammar(codec.tool_format, codec.control_token_ids)
        return None if found is None else await self.preparation.grammar(*found)

    def _chat_format(self, body: ChatRequest) -> ChatFormat:
        codec, names = self._engine.codec, frozenset(tool.function.name for tool in body.offered)
        if not names or codec.tool_format is None:
            return ChatFormat(codec, logprobs=body.logprobs)
        return ToolChatFormat(codec, logprobs=body.logprobs, form=codec.tool_format, names=names)

    async def _completion_format(self, body: CompletionRequest) -> Format:
        echoed = body.prompt if body.echo else []
        echoes = [p if isinstance(p, str) else await self.verbatim(p, "prompt") for p in echoed]
        return CompletionFormat(self._engine.codec, logprobs=body.logprobs is not None, echoes=echoes, n=body.n)

    def open(self, job: Job) -> EventStream:
        """Submit `job`; close what comes back.

        Raises `ApiError` if the engine has stopped or the server is about to, `RequestError` if it can never be served,
        `OverloadError` if too many wait.
        """
        if not self._engine.healthy:
            raise ApiError(503, "the engine has stopped: the server's log has the reason")
        if self.draining:
            raise ApiError(503, "the server is shutting down: send the request to another, or again in a while")
        refuse_huge(job, self.max_model_len)
        return EventStream(self._engine, job, self.metrics, self._limits)

    async def verbatim(self, token_ids: Sequence[int], field: str) -> str:
        """The text of tokens, special ones by name; raises `RequestError` (`field`) if one is unknown, or if there are
        more than ever fit.
        """
        if len(token_ids) > self.max_model_len:
            raise RequestError(
                f"{field} has {len(token_ids)} tokens, at most {self.max_model_len} (max_model_len) fit: send fewer",
                field,
            )
        return await self.preparation.tokenize(self._engine.codec.verbatim, token_ids, field)

    async def chat_prompt(
        self, messages: Sequence[Mapping[str, Any]], field: str, tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:  # fmt: skip
        """The tokens of a conversation up to the answer; raises `RequestError` (`field`) if it could never fit."""
        for at, message in enumerate(messages):
            if (message["role"] == "tool" or "tool_calls" in message) and self._engine.codec.tool_format is None:
                raise RequestError(f"{field}[{at}] is about tools: {_NO_TOOLS}", f"{field}[{at}].role")
        self._refuse_endless(texts_in(messages), field)
        self._refuse_endless(texts_in(tools), "tools")
        self._refuse_endless(texts_in(options), FIELD)
        return await self.preparation.tokenize(self._engine.codec.chat_prompt, messages, tools, options)

    async def text_prompt(self, text: str) -> tuple[int, ...]:
        """The tokens of a raw prompt; raises `RequestError` (field `prompt`) if it could never fit."""
        self._refuse_endless([text], "prompt")
        return await self.preparation.tokenize(self._engine.codec.encode, text)

    def _refuse_endless(self, texts: Iterable[str], field: str) -> None:
        """Tokenizing takes seconds for texts that are megabytes long: not for one that is too long anyway."""
        size = sum(len(text.encode()) for text in texts)
        most = self.max_model_len * self._engine.codec.longest_token_bytes
        if size > most:
            raise RequestError(
                f"{field} has {size} bytes of text, {self.max_model_len} tokens (max_model_len) hold at most {most}: "
                "shorten it",
                field,
            )


def _as_chat(error: RequestError, body: ChatRequest) -> RequestError:
    """What the engine, which knows of no messages, refused, with the names that the client sent."""
    if error.field == "prompt":
        return RequestError(f"messages: the {error}", "messages")
    if error.field == "max_tokens" and body.max_tokens is None and body.max_completion_tokens is not None:
        return RequestError(str(error).replace("max_tokens", "max_completion_tokens"), "max_completion_tokens")
    return error


async def _finished(events: EventStream, style: Format, job: Job, head: Json) -> Json:
    """The whole answer; what has not ended when it is given up is aborted."""
    try:
        return head | {"object": style.whole_object} | await _whole(events, style, job)
    finally:
        events.close()


async def _whole(events: EventStream, style: Format, job: Job) -> Json:
    """The choices and the usage of a whole answer."""
    choices = [Choice() for _ in range(job.choices)]
    usages: dict[int, Usage] = {}
    async for index, event in events:
        choices[index].add(event)
        usages[index] = event.usage
    # With alternatives of many tokens an answer is large, and making one would stall every stream.
    made = [await asyncio.to_thread(style.whole, index, choice) for index, choice in enumerate(choices)]
    return {
        "choices": made,
        "usage": usage_json([usages[index] for index in sorted(usages)], job.sampling.n),
    }


async def _frames(
    events: EventStream, head: Json, style: Format, n: int, options: StreamOptions | None
) -> AsyncIterator[str]:  # fmt: skip
    """The server-sent events of an answer: openings, deltas, the usage if asked for, [DONE]."""
    include_usage = options is not None and options.include_usage
    continuous = options is not None and options.continuous_usage_stats
    usages: dict[int, Usage] = {}
    try:
        async for index, event in events:
            opening = [] if index in usages else style.opening(index)
            usages[index] = event.usage
            tail = {"usage": usage_json([event.usage], 1) if continuous else None} if include_usage else {}
            for choice in (*opening, style.delta(index, event)):
                yield _frame(head | {"choices": [choice]} | tail)
        if include_usage:
            yield _frame(head | {"choices": [], "usage": usage_json([usages[index] for index in sorted(usages)], n)})
    except ApiError as error:
        yield _frame(error.body())
    yield "data: [DONE]\n\n"


def _frame(data: Json) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"
