"""The server's side of one engine: its state, and the walk of a request to its answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from tangram.engine.text.answer_text import AnswerText
from tangram.engine.text.codec import TextCodec
from tangram.errors import MachineError, RequestError
from tangram.serve.answers.answer import Answer, write_whole
from tangram.serve.answers.answer_size import check_answer_size
from tangram.serve.answers.bridge import EventStream, Limits, ServedEngine
from tangram.serve.answers.sending import EventSource
from tangram.serve.bodies.body import Json
from tangram.serve.bodies.template import Template
from tangram.serve.bodies.unsupported import IgnoredFields
from tangram.serve.chat.prompts import Prompts
from tangram.serve.endpoints import AnswerRequest, Endpoints, PreparedRequest
from tangram.serve.extension import Extension
from tangram.serve.messages.messages_schema import CountTokensRequest
from tangram.serve.observability.exposition import ServerMetrics
from tangram.serve.observability.record import Generation, Record, record_in
from tangram.serve.observability.reuse import explain_reuse
from tangram.serve.preparation import Preparation, unless_disconnected
from tangram.serve.responses.response_memory import ResponseMemory
from tangram.serve.transport.api_errors import ApiError


class Service:
    """Answers requests with one engine, as one model name.

    With `let_by`, fields that are not served are ignored and counted (`ignored`), not refused.
    `web` is told of what HTTP requests ask for before it is submitted, and when the server will
    end. Responses are kept in `memory`, or not at all.
    """

    def __init__(
        self,
        engine: ServedEngine,
        served_model_name: str,
        limits: Limits | None = None,
        let_by: bool = False,
        web: Extension | None = None,
        memory: ResponseMemory | None = None,
    ) -> None:
        self.model = served_model_name
        self.created_s = int(time.time())
        self.metrics = ServerMetrics(engine.stats)
        self.ignored = IgnoredFields(self.metrics.ignored_fields) if let_by else None
        self.template = Template(engine.codec, self.ignored)
        self.draining, self._web = False, web or Extension()
        self.engine, self._limits, self._started = engine, limits or Limits(), False
        self.preparation = Preparation(engine, self._limits)
        self.prompts = Prompts(engine, self.preparation, self.template)
        self.memory = memory or ResponseMemory()
        self._endpoints = Endpoints(self.prompts, served_model_name, engine.sampling, self.memory)

    @property
    def ready(self) -> bool:
        """Whether it takes new requests: the engine runs, and the server is not about to end."""
        return self._started and self.engine.healthy and not self.draining

    async def start(self) -> None:
        """Have the engine serve."""
        self.engine.grammars.warm()
        with suppress(MachineError):  # the log has the reason, and requests try again
            self.engine.codec.warm()
        await self.engine.start()
        self._started = True

    def drain(self) -> None:
        """Refuse new requests; running ones go on."""
        self.draining = True
        self._web.drain()

    async def stop(self) -> None:
        """Prepare nothing more, and end what runs."""
        self.preparation.stop()
        await self.engine.stop()
        await self.memory.stop()

    def check_model(self, model: str | None) -> None:
        """Raise `ApiError` 404 unless `model` is the served one, which None stands for."""
        if model not in (None, self.model):
            message = f"the model {model!r} does not exist: this server serves {self.model!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def answer(self, body: AnswerRequest, request: Request) -> Response:
        """The answer to `body`, whole or streamed. Raises `RequestError` and `ApiError`."""
        self.check_model(body.model)
        with _use_client_names(body):
            # Most refusals under load are decided here, before the prompt is tokenized.
            self.engine.check_queue(body.completions)
            record = record_in(request.scope)
            prepared = await self.preparation.of(request, self._endpoints.prepare, body, record)
            answer = await unless_disconnected(request, self._begin(prepared, record))
        with ExitStack() as ending:
            ending.callback(answer.close)  # also if the work is cancelled before it begins
            whole = await prepared.writer.open(answer)
            if body.stream:
                ending.pop_all()
                return EventSource(answer, prepared.writer)
            writing = write_whole(answer, prepared.writer)
            if whole is None:
                whole = await unless_disconnected(request, writing)
            else:
                ending.pop_all()
                record.background = self.memory.run_beside(writing)
            return await asyncio.to_thread(JSONResponse, whole)

    async def count_tokens(self, body: CountTokensRequest, request: Request) -> int:
        """The tokens of a conversation. Raises `RequestError` and `ApiError`."""
        self.check_model(body.model)
        with _use_client_names(body):
            return await self.preparation.of(request, self._endpoints.count_tokens, body)

    async def whole(self, body: AnswerRequest) -> Json:
        """The answer in one piece, for a caller that does not disconnect."""
        with _use_client_names(body):
            prepared = await self._endpoints.prepare(body, None)
            answer = await self._begin(prepared, None)
        return await write_whole(answer, prepared.writer)

    async def _begin(self, prepared: PreparedRequest, record: Record | None) -> Answer:
        """Submit the requests; close what comes back.

        Raises `ApiError` if the engine has stopped or the server is about to. Raises `RequestError`
        if they can never be served, `OverloadError` if too many wait.
        """
        if not self.engine.healthy:
            raise ApiError(503, "the engine has stopped: the server's log has the reason")
        if self.draining:
            raise ApiError(
                503, "the server is shutting down: send the request to another, or again in a while"
            )
        generation = prepared.generation
        may_stream = record is not None
        check_answer_size(
            generation, self.engine.max_model_len, self.engine.sampling, may_stream=may_stream
        )
        if record is not None:
            self._web.announce(generation, record)
        stream = await EventStream.open(self.engine, generation, self.metrics, self._limits, record)
        new_text = partial(_read_answer, self.engine.codec, generation)
        explain = partial(explain_reuse, generation, self.engine.codec)
        explains = generation.explains_reuse
        return Answer(stream, new_text, prepared.new_reader, explain if explains else None)


def _read_answer(codec: TextCodec, generation: Generation, choice: int) -> AnswerText:
    request = generation.request_of(choice)
    return AnswerText(codec, request.sampling, request.prompt_token_ids, request.marks)


@contextmanager
def _use_client_names(body: AnswerRequest | CountTokensRequest) -> Iterator[None]:
    """A `RequestError` inside comes out with the names that fields have at this endpoint."""
    try:
        yield
    except RequestError as error:
        raise body.rename(error) from error
