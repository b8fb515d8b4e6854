"""The request bodies of the OpenAI API, with vLLM's sampling fields and Tangram's."""

from __future__ import annotations

from collections.abc import Sequence
from reprlib import repr as shortened
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, SkipValidation, WithJsonSchema, model_validator

from tangram.errors import RequestError
from tangram.limits import MAX_LOGPROBS, MAX_TOOLS
from tangram.serve.bodies.answer_body import (
    TOKENS,
    MaxTokens,
    PromptOrTokens,
    SamplingFields,
    list_of,
)
from tangram.serve.bodies.body import Body, Json, Label, Metadata, encodable
from tangram.serve.bodies.json_schema import SchemaBounds
from tangram.serve.bodies.structured import ChatTool, ResponseFormat, Tool, ToolChoice, ToolPlace
from tangram.serve.bodies.template import Effort, TemplateOptions, Verbosity
from tangram.serve.bodies.unsupported import CHAT, COMPLETION, STREAM_OPTIONS, wrong_field
from tangram.serve.chat.chat_messages import Messages, PromptEnd
from tangram.serve.formats.call_grammar import CallGrammar, answer_grammar
from tangram.serve.formats.forms import AnswerForm

MAX_PROMPTS = 1024
MAX_COMPLETIONS = 1024


class StreamOptions(Body):
    """Options of a stream: `include_usage` adds a last chunk with the usage of the request.

    With `continuous_usage_stats` too, every chunk has what its choice has used so far, as in vLLM.
    Without a stream they change nothing.
    """

    refused = STREAM_OPTIONS
    include_usage: bool = False
    continuous_usage_stats: bool = False


class _GeneratingFields(SamplingFields):
    """The fields of both endpoints."""

    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None

    @property
    def shaped(self) -> bool:
        """Whether the answer is constrained."""
        return self.answer_schema is not None

    def check_schemas(self, bounds: SchemaBounds) -> None:
        """Raise `RequestError` naming a schema that is out of `bounds`."""
        if self.response_format is not None and (json := self.response_format.json_schema):
            bounds.measure(json.schema_, "response_format.json_schema.schema")
            bounds.check(json.schema_, "response_format.json_schema.schema")

    def grammar(self, form: AnswerForm, tools: Sequence[Tool] = ()) -> tuple[str, str] | None:
        """The grammar of an answer in `form` that may call `tools`, and the field that requires it.

        None for any text. Its schemas were checked.
        """
        schema = self.answer_schema
        return None if schema is None else (answer_grammar(schema, form), "response_format")

    @property
    def answer_schema(self) -> Json | None:
        """The schema of an answer that calls no tool; None for any text."""
        return None if self.response_format is None else self.response_format.answer_schema

    @model_validator(mode="after")
    def _a_grammar_says_where_answers_end(self) -> Self:
        for field in ("ignore_eos", "min_tokens") if self.shaped else ():
            if getattr(self, field):
                message = (
                    f"'{field}' goes with neither 'response_format' nor 'tools', which say "
                    "themselves where an "
                )
                raise wrong_field(field, f"{message}answer may end: leave it out")
        return self

    @model_validator(mode="after")
    def _prompts_are_scored_whole(self) -> Self:
        if self.stream and self.prompt_logprobs is not None:
            message = "'prompt_logprobs' is there for whole answers only: leave 'stream' out"
            raise wrong_field("prompt_logprobs", message)
        return self

    @property
    def shows_prompt(self) -> bool:
        """Whether the answer has something of the prompt, so that it needs no token."""
        return self.prompt_logprobs is not None

    @property
    def completions(self) -> int:
        """How many completions the request asks for."""
        return self.n

    def rename(self, error: RequestError) -> RequestError:
        """`error` with the names that the client sent."""
        return error


class ChatRequest(PromptEnd, _GeneratingFields):
    """The body of POST /v1/chat/completions.

    Without a token limit the model's own holds, or an answer may fill the context.
    """

    refused = CHAT
    messages: Messages
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    max_tokens: PromptOrTokens | None = None
    max_completion_tokens: Annotated[MaxTokens, Field(gt=0)] | None = None
    safety_identifier: Label | None = None
    metadata: Metadata = Field(default={})
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = Field(
        default=None, description="there is one tier: the answer says `default`"
    )
    chat_template_kwargs: TemplateOptions = Field(default={})
    reasoning_effort: Effort | None = Field(
        default=None, description="where the chat template reads it"
    )
    verbosity: Verbosity | None = Field(
        default=None, description="where the chat template reads it"
    )
    tools: list[ChatTool] = Field(default=[], max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True

    def rename(self, error: RequestError) -> RequestError:
        """As for every request; the engine knows of no messages."""
        if error.field == "prompt":
            return error.rename("messages", spoken="messages: the prompt")
        newer = self.max_tokens is None and self.max_completion_tokens is not None
        if error.field == "max_tokens" and newer:
            return error.rename("max_completion_tokens")
        return error

    @property
    def offered(self) -> Sequence[Tool]:
        """The tools that the model may call."""
        if self.tool_choice == "none":
            return []
        known = [tool for tool in self.tools if tool.place is not ToolPlace.NOWHERE]
        if isinstance(self.tool_choice, str):
            return known
        return [tool for tool in known if tool.function.name == self.tool_choice.name]

    @property
    def shaped(self) -> bool:
        """Whether the answer is constrained."""
        return bool(self.offered) or super().shaped

    def grammar(self, form: AnswerForm, tools: Sequence[Tool] = ()) -> tuple[str, str] | None:
        """As for every request, with tool calls as part of it."""
        if tools and form.tools is not None:
            parallel = self.parallel_tool_calls and isinstance(self.tool_choice, str)
            forced = self.tool_choice != "auto"
            calls = CallGrammar(tools, form.tools, forced, parallel, self.answer_schema, form)
            return calls.source(), "tools"
        return super().grammar(form)

    @model_validator(mode="after")
    def _tools_agree(self) -> Self:
        choice = self.tool_choice
        if choice not in ("none", "auto") and not self.offered:
            asked = choice if isinstance(choice, str) else choice.name
            there = ", ".join(tool.function.name for tool in self.tools[:8]) or "none"
            raise wrong_field(
                "tool_choice", f"'tool_choice' is {asked!r}, the tools that are there: {there}"
            )
        return self

    @model_validator(mode="after")
    def _agree(self) -> Self:
        self.check_end(self.messages)
        if self.top_logprobs is not None and not self.logprobs:
            raise wrong_field(
                "top_logprobs", "'top_logprobs' is allowed only when 'logprobs' is true"
            )
        newer, older = self.max_completion_tokens, self.max_tokens
        if newer is not None and older is not None and newer != older:
            message = (
                f"'max_completion_tokens' is {newer} and 'max_tokens', its older name, is {older}: "
                "send one of them"
            )
            raise wrong_field("max_completion_tokens", message)
        return self

    @property
    def own_sampling(self) -> dict[str, Any]:
        """The number of alternatives, and the token limit by either of its names."""
        newer, older = self.max_completion_tokens, self.max_tokens
        return {
            "logprobs": (self.top_logprobs or 0) if self.logprobs else None,
            "max_tokens": newer if older is None else older,
        }


_TEXT: Json = {"type": "string"}
_PROMPT_FORM = WithJsonSchema(
    {"anyOf": [_TEXT, TOKENS, list_of({"anyOf": [_TEXT, TOKENS]}, 1, MAX_PROMPTS)]}
)


def _as_prompts(value: Any) -> list[str | list[int]]:
    """The four forms of a prompt as a list: text, texts, token ids, lists of token ids."""
    several = isinstance(value, list) and not (value and type(value[0]) is int)
    prompts = value if several else [value]
    if len(prompts) > MAX_PROMPTS:
        raise ValueError(f"holds {len(prompts)} prompts, at most {MAX_PROMPTS} are allowed")
    if not prompts or not all(
        isinstance(prompt, str) or _is_token_ids(prompt) for prompt in prompts
    ):
        raise ValueError(
            "must be a string, a list of strings, a list of token ids or a list of lists of token "
            "ids"
        )
    for text in filter(lambda prompt: isinstance(prompt, str), prompts):
        encodable(text)
    return prompts


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


class CompletionRequest(_GeneratingFields):
    """The body of POST /v1/completions.

    `logprobs` is the number of alternatives for each token, of the prompt too if it is echoed.
    """

    refused = COMPLETION
    # Types are checked once: there may be millions of tokens.
    prompt: Annotated[
        list[str | list[int]], SkipValidation, BeforeValidator(_as_prompts), _PROMPT_FORM
    ]
    echo: bool = Field(default=False, description="begin the text with the prompt")

    @property
    def completions(self) -> int:
        """`n` for each prompt."""
        return len(self.prompt) * self.n

    @model_validator(mode="after")
    def _not_too_many(self) -> Self:
        if len(self.prompt) * self.n > max(MAX_COMPLETIONS, self.n):
            number = shortened(self.n)
            message = (
                f"n is {number} for {len(self.prompt)} prompts: at most {MAX_COMPLETIONS} "
                "completions are allowed"
            )
            raise wrong_field("n", message)
        return self

    @property
    def shows_prompt(self) -> bool:
        """As for every request, or by `echo`."""
        return self.echo or super().shows_prompt

    def rename(self, error: RequestError) -> RequestError:
        """As for every request; `logprobs` may be what asks for those of the prompt."""
        stated = error.field != "prompt_logprobs" or self.prompt_logprobs is not None
        return error if stated else error.rename("logprobs")

    @property
    def own_sampling(self) -> dict[str, Any]:
        """What is echoed has log-probabilities, too."""
        if not self.echo or self.logprobs is None:
            return {}
        return {"prompt_logprobs": max(self.logprobs, self.prompt_logprobs or 0)}
