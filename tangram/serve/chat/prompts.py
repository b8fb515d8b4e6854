"""Requests as the engine takes them: the tokens of prompts, and the grammar of the answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tangram.errors import RequestError
from tangram.limits import check_size
from tangram.serve.answers.bridge import ServedEngine
from tangram.serve.bodies.body import texts_in
from tangram.serve.bodies.json_schema import SchemaBounds
from tangram.serve.bodies.schema_parts import blame
from tangram.serve.bodies.structured import INPUT, Tool, ToolPlace
from tangram.serve.bodies.template import FIELD, Template
from tangram.serve.chat.offer import Offer
from tangram.serve.chat.schema import ChatRequest, CompletionRequest
from tangram.serve.formats.call_grammar import UNESCAPED, CallGrammar
from tangram.serve.formats.forms import AnswerForm
from tangram.serve.preparation import Preparation
from tangram.types import Grammar

_SPARE_SHARE = 8  # of the context, for the answer to a conversation that was cut
_NO_TOOLS = (
    "the chat template of this model shows it no tools, or has calls written in a form that this "
    "server cannot read: leave them out, or choose another model"
)

_NO_LARK = (
    "this model writes texts in JSON, which can follow a 'regex' but no grammar of 'lark': send a "
    "'regex', or leave the format out"
)


@dataclass(frozen=True)
class PreparedChat:
    """The tokens of a conversation, the grammar of its answer and the answer's form.

    `tools` may be called. `warnings` are for the answer.
    """

    prompt: tuple[int, ...]
    grammar: Grammar | None
    form: AnswerForm
    tools: Sequence[Tool]
    warnings: Sequence[str]


class Prompts:
    """Makes prompts for `engine` on the threads of `preparation`."""

    def __init__(self, engine: ServedEngine, preparation: Preparation, template: Template) -> None:
        self.codec, self.most_tokens = engine.codec, engine.max_model_len
        self._preparation, self._template = preparation, template

    async def prepare_chat(
        self, body: ChatRequest, rename_field: Callable[[str], str] = str
    ) -> PreparedChat:
        """A conversation ready for the engine.

        `rename_field` maps the names of fields of the chat endpoint to those of another endpoint.
        Raises `RequestError`.
        """
        form, offer = await self._offer(body)
        prompt = await self._tokenize(body, form, rename_field)
        form = form.after(self.codec, prompt)
        grammar = await self._compile_chat(body, offer, form, rename_field)
        offered, warnings = list(offer.tools.values()), offer.list_warnings(rename_field)
        return PreparedChat(prompt, grammar, form, offered, warnings)

    async def tokenize_conversation(
        self, body: ChatRequest, rename_field: Callable[[str], str] = str
    ) -> tuple[int, ...]:
        """The tokens of a conversation, as `prepare_chat` has them."""
        form, _ = await self._offer(body)
        return await self._tokenize(body, form, rename_field)

    async def _offer(self, body: ChatRequest) -> tuple[AnswerForm, Offer]:
        """The form of answers to `body`, and the tools that they may call."""
        form = AnswerForm.of(self.codec)
        if body.tools and form.tools is None:
            raise RequestError(f"tools: {_NO_TOOLS}", "tools")
        # Before anything is made of them; those of 200 tools take a while.
        if body.tools or body.shaped:
            offer = await self._preparation.parser.run(_check_schemas, body)
            await self._check_inputs(offer, form)
            return form, offer
        return form, Offer(free=False, tools={})

    async def _check_inputs(self, offer: Offer, form: AnswerForm) -> None:
        """Raise `RequestError` for a grammar of a custom tool that is none.

        Where calls are JSON, the inputs of others are held to no grammar in Lark.
        """
        larks = {at: t.custom.lark for at, t in offer.tools.items() if t.custom and t.custom.lark}
        if not larks or form.tools is None:
            return
        faults = await self._preparation.find_faults(list(larks.values()), "tools")
        for number, reason in faults.items():
            place = f"tools[{list(larks)[number]}].custom.format.grammar.definition"
            raise blame(f"is no valid grammar: {reason}", place)
        for at in larks if form.tools.style not in UNESCAPED else ():
            if "pattern" not in offer.tools[at].arguments()["properties"][INPUT]:
                offer.loosen([at], blame(_NO_LARK, f"tools[{at}].custom.format"))

    async def _tokenize(
        self, body: ChatRequest, form: AnswerForm, rename_field: Callable[[str], str]
    ) -> tuple[int, ...]:
        """The tokens of the conversation of `body`, to which an answer in `form` belongs."""
        listed = [tool for tool in body.tools if tool.place is ToolPlace.LIST]
        tools = [tool.for_template() for tool in listed if body.tool_choice != "none"]
        if form.tools is not None and form.tools.described:
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
        options |= body.template_options
        return await self.tokenize_chat(messages, field, tools, options, body.options["cache_salt"])

    async def truncate(self, body: ChatRequest, answer_tokens: int | None) -> ChatRequest:
        """`body` without its oldest messages, as few as let it fit with an answer.

        System messages stay, and the rest begins with a message of `user`: the last such message,
        if not even that fits.
        """
        turns = [at for at, message in enumerate(body.messages) if message.role == "user"]

        def begin(at: int) -> ChatRequest:
            kept = [
                message
                for place, message in enumerate(body.messages)
                if place >= at or message.role in ("system", "developer")
            ]
            return body.model_copy(update={"messages": kept})

        most = self.most_tokens
        if not turns or await self._fits(body, min(answer_tokens or 1, most // 2)):
            return body
        room = min(answer_tokens or most // _SPARE_SHARE, most // 2)
        low, high = 1, len(turns) - 1  # of the places in `turns`
        while low < high:
            middle = (low + high) // 2
            fits = await self._fits(begin(turns[middle]), room)
            low, high = (low, middle) if fits else (middle + 1, high)
        return begin(turns[low]) if low < len(turns) else body

    async def _fits(self, body: ChatRequest, answer_tokens: int) -> bool:
        """Whether a conversation and an answer fit. Raises as `prepare_chat` does."""
        try:
            self._check_size(texts_in([each.for_template() for each in body.messages]), "messages")
        except RequestError:
            return False
        tokens = await self._tokenize(body, AnswerForm.of(self.codec), str)
        return len(tokens) + answer_tokens <= self.most_tokens

    async def _compile_chat(
        self, body: ChatRequest, offer: Offer, form: AnswerForm, rename_field: Callable[[str], str]
    ) -> Grammar | None:
        """The grammar of the answer. Tools that stand in its way are held to no schema."""

        async def compile_now() -> Grammar | None:
            tools = list(offer.tools.values())
            return await self._compile(body.grammar(form, tools), rename_field)

        try:
            return await compile_now()
        except RequestError as error:
            first = error
        for loosen in (self._loosen_faulty, _loosen_all):
            if not offer.held:
                break
            await loosen(offer, form, first)
            with suppress(RequestError):
                return await compile_now()
        raise first

    async def _loosen_faulty(self, offer: Offer, form: AnswerForm, _: RequestError) -> None:
        """Loosen the tools of which no grammar can be made."""
        assert form.tools is not None
        sources = dict[int, str]()
        for at, tool in offer.held.items():
            alone = CallGrammar([tool], form.tools, forced=False, parallel=False, schema=None)
            try:
                sources[at] = alone.describe_arguments()
            except RequestError as error:
                field = error.field.replace("tools[0]", f"tools[{at}]", 1)
                offer.loosen([at], error.rename(field))
        faults = await self._preparation.find_faults(list(sources.values()), "tools")
        places = list(sources)
        for number, reason in faults.items():
            field = f"tools[{places[number]}].function.parameters"
            offer.loosen([places[number]], blame(reason, field))

    async def compile_grammar(self, body: CompletionRequest) -> Grammar | None:
        """The grammar of the answers to `body`; None for any text."""
        if body.shaped:
            await self._preparation.parser.run(body.check_schemas, SchemaBounds())
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
        salt: str = "",
    ) -> tuple[int, ...]:
        """The tokens of a conversation up to the answer; see `TextCodec.encode_chat`.

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
        return await self._preparation.tokenizer.run(self.codec.encode_chat, parts, salt)

    async def tokenize_text(self, text: str) -> tuple[int, ...]:
        """The tokens of a raw prompt; raises `RequestError` (`prompt`) if it could never fit."""
        self._check_size([text], "prompt")
        return await self._preparation.tokenizer.run(self.codec.encode, text)

    async def detokenize(self, token_ids: Sequence[int], field: str) -> str:
        """The text of tokens, special ones by name.

        Raises `RequestError` (`field`) for unknown tokens, or for more than ever fit.
        """
        if len(token_ids) > self.most_tokens:
            raise RequestError(
                f"{field} has {len(token_ids)} tokens, at most {self.most_tokens} "
                "(max_model_len) fit: send fewer",
                field,
            )
        return await self._preparation.tokenizer.run(self.codec.verbatim, token_ids, field)

    def _check_size(self, texts: Iterable[str], field: str) -> None:
        check_size(texts, field, self.most_tokens, self.codec.longest_token_bytes)


def _check_schemas(body: ChatRequest) -> Offer:
    """What `body` offers. Raises `RequestError` for a schema that cannot be followed but must."""
    bounds = SchemaBounds()
    body.check_schemas(bounds)
    return Offer.of(body, bounds)


async def _loosen_all(offer: Offer, _: AnswerForm, error: RequestError) -> None:
    offer.loosen(list(offer.held), error)
