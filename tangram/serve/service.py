"""One HTTP request's walk: body → prompt tokens → engine → reply, whole or streamed."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from tangram.errors import RequestError
from tangram.limits import check_size
from tangram.serve.answers import finish, frames
from tangram.serve.api_errors import ApiError
from tangram.serve.body import texts_in
from tangram.serve.bridge import EventStream, Job, Limits, ServedEngine
from tangram.serve.exposition import ServerMetrics
from tangram.serve.forms import AnswerForm
from tangram.serve.preparation import Preparation, unless_disconnected
from tangram.serve.reading import ReadChatFormat
from tangram.serve.record import Record, record_of
from tangram.serve.replies import ChatFormat, CompletionFormat, Format, Json, refuse_huge
from tangram.serve.schema import ChatRequest, CompletionRequest
from tangram.serve.sending import EventSource
from tangram.serve.template import FIELD, Template
from tangram.serve.unknown import IgnoredFields
from tangram.types import Grammar, Marks

# A step takes seconds at most; the first may compile. Beyond this its device hangs.
MOST_STEP_S = 600
# So long is the step under way waited for when the server ends.
LAST_STEP_S = 30
_log = logging.getLogger(__name__)
# What the engine needs of a request: how its answer is written, the prompts, what an answer must be
# like, and the control tokens that it is told by.
_Parts = tuple[Format, list[tuple[int, ...]], Grammar | None, Marks]
_NO_TOOLS = (
    "the chat template of this model shows it no tools, or has calls written in a form that this "
    "server cannot read: leave them out, or choose another model"
)


@dataclass(frozen=True)
class Asked:
    """A conversation as the engine takes it, and the form of its answer."""

    prompt: tuple[int, ...]
    grammar: Grammar | None
    form: AnswerForm
    marks: Marks


class Service:
    """Answers both completion endpoints for one engine and one model name. With `let_by`, fields
    that are not served are `ignored`, and counted, instead of refused.
    """

    def __init__(
        self,
        engine: ServedEngine,
        served_model_name: str,
        limits: Limits | None = None,
        let_by: bool = False,
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
        """Whether the engine can still answer: its thread lives, and its step has not taken ten
        minutes.
        """
        return self._engine.healthy and not self._hangs

    @property
    def ready(self) -> bool:
        """Whether new requests should come here: the engine runs, and the server is not about to
        end.
        """
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
                _log.error(
                    "a step of the engine has not ended for %.0f s: the server is not healthy",
                    now_s - since_s,
                )
            self._hangs = hangs
            await asyncio.sleep(MOST_STEP_S / 60)

    def stop(self) -> None:
        """End the engine's thread; what still runs is aborted. A step that does not end is left,
        see `stuck`.
        """
        self.preparation.stop()
        if self._stopping is None:
            # A thread that would not keep the process, as those of a pool do.
            self._stopping = threading.Thread(
                target=self._engine.stop, name="engine-stop", daemon=True
            )
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
            return EventSource(
                frames(events, head, style, job.sampling.n, body.stream_options), events
            )
        try:
            found = await unless_disconnected(request, finish(events, style, job, head))
            return await asyncio.to_thread(JSONResponse, found)
        finally:
            events.close()  # also if the work was given up before it began

    async def whole(self, body: ChatRequest | CompletionRequest) -> Json:
        """The answer in one piece, for a caller that does not hang up."""
        return await finish(*self._begin(body, await self._parts(body)))

    async def _parts(self, body: ChatRequest | CompletionRequest) -> _Parts:
        if isinstance(body, ChatRequest):
            asked = await self.ask(body, "messages")
            return self._chat_format(body, asked.form), [asked.prompt], asked.grammar, asked.marks
        found = body.grammar(AnswerForm())
        grammar = None if found is None else await self.preparation.grammar(*found)
        prompts = [
            await self.text_prompt(p) if isinstance(p, str) else tuple(p) for p in body.prompt
        ]
        if not all(prompts):
            raise ApiError(
                400,
                "prompt holds no tokens: send at least one",
                param="prompt",
                code="invalid_value",
            )
        return await self._completion_format(body), prompts, grammar, Marks()

    async def ask(self, body: ChatRequest, field: str) -> Asked:
        """The prompt of a conversation, and how it is answered. Raises `RequestError`, `field` for
        the messages.
        """
        form = AnswerForm.of(self._engine.codec)
        if body.tools and form.tools is None:
            raise RequestError(f"tools: {_NO_TOOLS}", "tools")
        body.grammar(form)  # what is wrong with a schema is said before anything is made of it
        tools = [tool.for_template() for tool in body.tools if body.tool_choice != "none"]
        if form.channels:  # the template of GPT-OSS takes no tool without one
            for tool in tools:
                tool["function"].setdefault("description", "")
        messages = [
            form.adapt_message(message.for_template(), f"{field}[{at}]")
            for at, message in enumerate(body.messages)
        ]
        options = self.template.set_variables(
            body.chat_template_kwargs, body.reasoning_effort, body.verbosity
        )
        prompt = await self.chat_prompt(messages, field, tools, options)
        form = form.after(self._engine.codec, prompt)
        found = body.grammar(form)
        grammar = None if found is None else await self.preparation.grammar(*found)
        return Asked(prompt, grammar, form, form.list_shown_marks(body.offered))

    def _begin(
        self, body: ChatRequest | CompletionRequest, parts: _Parts, record: Record | None = None
    ) -> tuple[EventStream, Format, Job, Json]:
        style, prompts, grammar, marks = parts
        identity = f"{style.id_prefix}-{uuid.uuid4().hex}"
        try:
            job = Job(
                identity,
                prompts,
                body.sampling(),
                body.kv_retention,
                body.cache_salt,
                body.stream,
                grammar,
                record,
                marks,
            )
            head: Json = {"id": identity, "created": int(time.time()), "model": self.model}
            if isinstance(body, ChatRequest) and body.service_tier is not None:
                head["service_tier"] = "default"
            return self.open(job), style, job, head
        except RequestError as error:
            if not isinstance(body, ChatRequest):
                raise
            raise _as_chat(error, body) from error

    def _chat_format(self, body: ChatRequest, form: AnswerForm) -> ChatFormat:
        codec, reader = self._engine.codec, form.reader(body.offered)
        if reader is None:
            return ChatFormat(codec, logprobs=body.logprobs)
        return ReadChatFormat(
            codec, logprobs=body.logprobs, reader=reader, thinks=form.thinking is not None
        )

    async def _completion_format(self, body: CompletionRequest) -> Format:
        echoed = body.prompt if body.echo else []
        echoes = [p if isinstance(p, str) else await self.verbatim(p, "prompt") for p in echoed]
        return CompletionFormat(
            self._engine.codec, logprobs=body.logprobs is not None, echoes=echoes, n=body.n
        )

    def open(self, job: Job) -> EventStream:
        """Submit `job`; close what comes back.

        Raises `ApiError` if the engine has stopped or the server is about to, `RequestError` if it
        can never be served, `OverloadError` if too many wait.
        """
        if not self._engine.healthy:
            raise ApiError(503, "the engine has stopped: the server's log has the reason")
        if self.draining:
            raise ApiError(
                503, "the server is shutting down: send the request to another, or again in a while"
            )
        refuse_huge(job, self.max_model_len)
        return EventStream(self._engine, job, self.metrics, self._limits)

    async def verbatim(self, token_ids: Sequence[int], field: str) -> str:
        """The text of tokens, special ones by name; raises `RequestError` (`field`) if one is
        unknown, or if there are more than ever fit.
        """
        if len(token_ids) > self.max_model_len:
            raise RequestError(
                f"{field} has {len(token_ids)} tokens, at most {self.max_model_len} "
                "(max_model_len) fit: send fewer",
                field,
            )
        return await self.preparation.tokenize(self._engine.codec.verbatim, token_ids, field)

    async def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        field: str,
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        """The tokens of a conversation up to the answer; raises `RequestError` (`field`) if it
        could never fit.
        """
        for at, message in enumerate(messages):
            if (
                message["role"] == "tool" or "tool_calls" in message
            ) and self._engine.codec.tool_format is None:
                raise RequestError(
                    f"{field}[{at}] is about tools: {_NO_TOOLS}", f"{field}[{at}].role"
                )
        self._refuse_endless(texts_in(messages), field)
        self._refuse_endless(texts_in(tools), "tools")
        self._refuse_endless(texts_in(options), FIELD)
        return await self.preparation.tokenize(
            self._engine.codec.chat_prompt, messages, tools, options
        )

    async def text_prompt(self, text: str) -> tuple[int, ...]:
        """The tokens of a raw prompt; raises `RequestError` (field `prompt`) if it
        could never fit.
        """
        self._refuse_endless([text], "prompt")
        return await self.preparation.tokenize(self._engine.codec.encode, text)

    def _refuse_endless(self, texts: Iterable[str], field: str) -> None:
        check_size(texts, field, self.max_model_len, self._engine.codec.longest_token_bytes)


def _as_chat(error: RequestError, body: ChatRequest) -> RequestError:
    """What the engine, which knows of no messages, refused, with the names that the client sent."""
    if error.field == "prompt":
        return RequestError(f"messages: the {error}", "messages")
    if (
        error.field == "max_tokens"
        and body.max_tokens is None
        and body.max_completion_tokens is not None
    ):
        return RequestError(
            str(error).replace("max_tokens", "max_completion_tokens"), "max_completion_tokens"
        )
    return error
