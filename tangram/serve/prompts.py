"""Requests as the engine takes them: the tokens of prompts, and the grammar of the answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tangram.errors import RequestError
from tangram.limits import check_size
from tangram.serve.body import texts_in
from tangram.serve.bridge import ServedEngine
from tangram.serve.forms import AnswerForm
from tangram.serve.json_schema import SchemaBounds
from tangram.serve.preparation import Preparation
from tangram.serve.schema import ChatRequest, CompletionRequest
from tangram.serve.template import FIELD, Template
from tangram.types import Grammar

_NO_TOOLS = (
    "the chat template of this model shows it no tools, or has calls written in a form that this "
    "server cannot read: leave them out, or choose another model"
)


class Prompts:
    """Makes prompts for `engine` on the threads of `preparation`."""

    def __init__(self, engine: ServedEngine, preparation: Preparation, template: Template) -> None:
        self.codec, self._most_tokens = engine.codec, engine.max_model_len
        self._preparation, self._template = preparation, template

    async def prepare_chat(
        self, body: ChatRequest, rename_field: Callable[[str], str] = str
    ) -> tuple[tuple[int, ...], Grammar | None, AnswerForm]:
        """The tokens of a conversation, the grammar of its answer, and the answer's form.

        `rename_field` maps the names of fields of the chat endpoint to those of another endpoint.
        Raises `RequestError`.
        """
        form = AnswerForm.of(self.codec)
        if body.tools and form.tools is None:
            raise RequestError(f"tools: {_NO_TOOLS}", "tools")
        body.check_schemas(SchemaBounds())  # before anything is made of them
        tools = [tool.for_template() for tool in body.tools if body.tool_choice != "none"]
        if form.channels:  # the template of GPT-OSS takes no tool without one
            for tool in tools:
                tool["function"].setdefault("description", "")
        field = rename_field("messages")
        messages = [
            form.adapt_message(message.for_template(), f"{field}[{at}]")
            for at, message in enumerate(body.messages)
        ]
        options = self._template.set_variables(
            body.chat_template_kwargs, body.reasoning_effort, body.verbosity
        )
        prompt = await self.tokenize_chat(messages, field, tools, options)
        form = form.after(self.codec, prompt)
        return prompt, await self._compile(body.grammar(form), rename_field), form

    async def compile_grammar(self, body: CompletionRequest) -> Grammar | None:
        """The grammar of the answers to `body`; None for any text."""
        body.check_schemas(SchemaBounds())
        return await self._compile(body.grammar(AnswerForm()), str)

    async def _compile(
        self, wanted: tuple[str, str] | None, rename_field: Callable[[str], str]
    ) -> Grammar | None:
        if wanted is None:
            return None
        source, field = wanted
        return await self._preparation.grammar(source, rename_field(field))

    async def tokenize_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        field: str,
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        """The tokens of a conversation up to the answer.

        Raises `RequestError` (`field`) if it could never fit.
        """
        for at, message in enumerate(messages):
            about_tools = message["role"] == "tool" or "tool_calls" in message
            if about_tools and self.codec.tool_format is None:
                raise RequestError(
                    f"{field}[{at}] is about tools: {_NO_TOOLS}", f"{field}[{at}].role"
                )
        self._check_size(texts_in(messages), field)
        self._check_size(texts_in(tools), "tools")
        self._check_size(texts_in(options), FIELD)
        parts = await self._preparation.renderer.run(
            self.codec.render_chat, messages, tools, options
        )
        self._check_size(parts, field)  # a template may write a text many times
        return await self._preparation.tokenizer.run(self.codec.encode_chat, parts)

    async def tokenize_text(self, text: str) -> tuple[int, ...]:
        """The tokens of a raw prompt; raises `RequestError` (`prompt`) if it could never fit."""
        self._check_size([text], "prompt")
        return await self._preparation.tokenizer.run(self.codec.encode, text)

    async def detokenize(self, token_ids: Sequence[int], field: str) -> str:
        """The text of tokens, special ones by name.

        Raises `RequestError` (`field`) for unknown tokens, or for more than ever fit.
        """
        if len(token_ids) > self._most_tokens:
            raise RequestError(
                f"{field} has {len(token_ids)} tokens, at most {self._most_tokens} "
                "(max_model_len) fit: send fewer",
                field,
            )
        return await self._preparation.tokenizer.run(self.codec.verbatim, token_ids, field)

    def _check_size(self, texts: Iterable[str], field: str) -> None:
        check_size(texts, field, self._most_tokens, self.codec.longest_token_bytes)
