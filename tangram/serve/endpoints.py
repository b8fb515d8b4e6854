"""What each endpoint makes of a body: requests to the engine, a reader and a writer."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from pydantic import ValidationError

from tangram.serve.answers.answer import Writer
from tangram.serve.bodies.answer_body import ReadAsChat
from tangram.serve.bodies.body import Json
from tangram.serve.chat.chat_writer import ChatWriter
from tangram.serve.chat.completion_writer import CompletionWriter, EchoedPrompt
from tangram.serve.chat.prompts import PreparedChat, Prompts
from tangram.serve.chat.schema import ChatRequest, CompletionRequest
from tangram.serve.formats.thoughts import Reader, TextReader
from tangram.serve.messages.messages_schema import CountTokensRequest, MessagesRequest
from tangram.serve.messages.messages_writer import MessagesWriter
from tangram.serve.observability.record import Generation, Record
from tangram.serve.responses.response_memory import ResponseMemory, name_owner
from tangram.serve.responses.responses_schema import ResponsesRequest
from tangram.serve.responses.responses_writer import ResponsesWriter
from tangram.serve.transport.api_errors import ApiError, of_validation
from tangram.types import Grammar, Marks, Request, SamplingValues

AnswerRequest = ChatRequest | CompletionRequest | ResponsesRequest | MessagesRequest


@dataclass(frozen=True)
class PreparedRequest:
    """What is to be generated. A reader takes each completion apart, `writer` spells the answer."""

    generation: Generation
    new_reader: Callable[[], Reader]
    writer: Writer


@dataclass(frozen=True)
class Endpoints:
    """Prepares the requests of the endpoints that answer, for one `model`.

    `sampling` holds where they state nothing.
    """

    prompts: Prompts
    model: str
    sampling: SamplingValues
    memory: ResponseMemory

    async def prepare(self, body: AnswerRequest, record: Record | None) -> PreparedRequest:
        """`body` ready for the engine. Raises `RequestError` and `ApiError`."""
        if isinstance(body, ChatRequest):
            return await self._prepare_chat(body, record)
        if isinstance(body, CompletionRequest):
            return await self._prepare_completion(body, record)
        if isinstance(body, MessagesRequest):
            return await self._prepare_message(body, record)
        return await self._prepare_response(body, record)

    async def count_tokens(self, body: CountTokensRequest) -> int:
        """The tokens of a conversation, as its answer would count them. Raises as `prepare`."""
        as_chat = await self._read_as_chat(body, partial(body.chat, self._variables))
        return len(await self.prompts.tokenize_conversation(as_chat, body.rename_field))

    async def _prepare_chat(self, body: ChatRequest, record: Record | None) -> PreparedRequest:
        chat, head = await self.prompts.prepare_chat(body), self._make_head(ChatWriter.id_prefix)
        if body.service_tier is not None:
            head["service_tier"] = "default"
        writer = ChatWriter(
            self.prompts.codec,
            head,
            logprobs=body.logprobs,
            prompt_logprobs=body.prompt_logprobs,
            marks_thoughts=chat.form.thinking is not None,
            options=body.stream_options,
            warnings=chat.warnings,
        )
        return _prepare_answer(head["id"], chat, body, record, writer)

    async def _prepare_completion(
        self, body: CompletionRequest, record: Record | None
    ) -> PreparedRequest:
        grammar = await self.prompts.compile_grammar(body)
        prompts = [
            await self.prompts.tokenize_text(prompt) if isinstance(prompt, str) else tuple(prompt)
            for prompt in body.prompt
        ]
        if not all(prompts):
            message = "prompt holds no tokens: send at least one"
            raise ApiError(400, message, param="prompt", code="invalid_value")
        echoes = [
            EchoedPrompt(
                prompt
                if isinstance(prompt, str)
                else await self.prompts.detokenize(prompt, "prompt"),
                tokens[0],
            )
            for prompt, tokens in (zip(body.prompt, prompts, strict=True) if body.echo else ())
        ]
        head = self._make_head(CompletionWriter.id_prefix)
        writer = CompletionWriter(
            self.prompts.codec,
            head,
            logprobs=body.logprobs,
            prompt_logprobs=body.prompt_logprobs,
            echoes=echoes,
            n=body.n,
            options=body.stream_options,
        )
        codec = self.prompts.codec
        thinks = body.thinking_token_budget is not None
        marks = Marks(thinking=codec.thinking_format if thinks else None)
        generation = _make_generation(head["id"], prompts, body, record, grammar, marks)
        return PreparedRequest(generation, TextReader, writer)

    async def _prepare_response(
        self, body: ResponsesRequest, record: Record | None
    ) -> PreparedRequest:
        """A response is a chat in other words."""
        owner = name_owner(record, body.cache_salt)
        recalled = await self.memory.recall(body, owner)
        read = partial(body.chat, recalled.items, recalled.named)
        as_chat = await self._read_as_chat(body, read)
        if body.truncation == "auto":
            as_chat = await self.prompts.truncate(as_chat, body.max_output_tokens)
        chat = await self.prompts.prepare_chat(as_chat, body.rename_field)
        response_id = f"resp_{uuid.uuid4().hex}"
        values = self.sampling.with_stated(body.sampling())
        kept = self.memory.keep(body, owner, recalled)
        warnings = [*body.list_warnings(), *chat.warnings]
        writer = ResponsesWriter(body, response_id, self.model, values, warnings, kept)
        return _prepare_answer(response_id, chat, body, record, writer)

    async def _prepare_message(
        self, body: MessagesRequest, record: Record | None
    ) -> PreparedRequest:
        """So is a message. Clients ask for more tokens than a small context has left."""
        as_chat = await self._read_as_chat(body, partial(body.chat, self._variables))
        chat = await self.prompts.prepare_chat(as_chat, body.rename_field)
        message_id = f"msg_{uuid.uuid4().hex}"
        left = self.prompts.most_tokens - len(chat.prompt)
        if left < 1:  # in the words by which clients know when to shorten a conversation
            most = f"{len(chat.prompt)} tokens > {self.prompts.most_tokens - 1} maximum"
            raise ApiError(400, f"prompt is too long: {most}")
        # GPT-OSS thinks on a channel, where no budget can be kept.
        thinking = None if chat.form.channels else body.thinking
        fits = {"max_tokens": min(body.max_tokens, left), "thinking": thinking}
        fitting = body.model_copy(update=fits)
        request_id = message_id if record is None else record.request_id
        writer = MessagesWriter(body, message_id, self.model, request_id, chat.warnings)
        return _prepare_answer(message_id, chat, fitting, record, writer)

    @property
    def _variables(self) -> frozenset[str]:
        return self.prompts.codec.template_options

    async def _read_as_chat(self, body: ReadAsChat, read: Callable[[], ChatRequest]) -> ChatRequest:
        """What `read` makes of `body`, in a thread: thousands of messages take a while."""
        try:
            return await asyncio.to_thread(read)
        except ValidationError as error:
            raise of_validation(error, body.rename_field) from error

    def _make_head(self, prefix: str) -> Json:
        identity = f"{prefix}-{uuid.uuid4().hex}"
        return {"id": identity, "created": int(time.time()), "model": self.model}


def _prepare_answer(
    answer_id: str, chat: PreparedChat, body: AnswerRequest, record: Record | None, writer: Writer
) -> PreparedRequest:
    """The answer to `chat`, which is `body` in the words of the chat endpoint."""
    marks = chat.form.list_shown_marks(chat.tools)
    generation = _make_generation(answer_id, [chat.prompt], body, record, chat.grammar, marks)
    return PreparedRequest(generation, chat.form.reader(chat.tools), writer)


def _make_generation(
    response_id: str,
    prompts: list[tuple[int, ...]],
    body: AnswerRequest,
    record: Record | None,
    grammar: Grammar | None,
    marks: Marks,
) -> Generation:
    name = response_id if record is None else record.request_id
    names = [f"{name}-{number}" for number in range(len(prompts))] if len(prompts) > 1 else [name]
    client = b"" if record is None else record.client
    common: Json = {"grammar": grammar, "marks": marks, "client": client, **body.options}
    sampling = body.sampling()
    requests = [
        Request(name, prompt, sampling, **common)
        for name, prompt in zip(names, prompts, strict=True)
    ]
    return Generation(response_id, requests, body.stream, body.explain_reuse)
