"""The fields of a body that asks for an answer: those that `tangram/types.py` describes, in JSON.

A field that is described there is in the bodies, and in the document of the API.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import reduce
from operator import or_
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from msgspec import Meta
from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, create_model

from tangram.errors import RequestError
from tangram.limits import TOKEN_COUNT, Biases, Bounds, Texts, Tokens
from tangram.serve.bodies.body import Body, Json, Label, Text
from tangram.types import RequestOptions, SamplingParams

_MAX_TOKEN_DIGITS = 10
_OPTIONS = {entry.name for entry in fields(RequestOptions)}
_SAMPLING = {entry.name for entry in fields(SamplingParams)}
_RESPONSES = ("temperature", "top_p")  # what `/v1/responses` has of `SamplingParams`
_MESSAGES = ("top_k",)  # what `/v1/messages` has beside these


def range_of(bounds: Bounds) -> Json:
    """`bounds` as a JSON schema says them."""
    low = "exclusiveMinimum" if bounds.open_low else "minimum"
    return {low: bounds.low, "maximum": bounds.high}


def texts_of(limit: Texts) -> Json:
    """The JSON schema of a list of texts."""
    text = {"type": "string", "minLength": 1, "maxLength": limit.most_characters}
    return list_of(text, 0, limit.most)


def list_of(items: Json, least: int, most: int) -> Json:
    """The JSON schema of a list."""
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


# The vocabulary depends on the model; none is larger than this.
TOKEN: Json = {"type": "integer", "minimum": 0, "maximum": TOKEN_COUNT.high}
TOKENS = list_of(TOKEN, 1, 1_000_000)
MaxTokens = Annotated[int, WithJsonSchema({"type": "integer"} | range_of(TOKEN_COUNT))]
# 0 for a prompt that the answer has something of.
PromptOrTokens = Annotated[int, WithJsonSchema(TOKEN)]


def _describe_fields(described: type, *names: str) -> dict[str, Any]:
    """The fields of a dataclass, or those of `names`, as `create_model` takes them."""
    hints = get_type_hints(described, include_extras=True)
    defaults = {
        entry.name: entry.default if entry.default_factory is MISSING else entry.default_factory()
        for entry in fields(described)
    }
    return {name: (_spell(hints[name]), defaults[name]) for name in names or defaults}


def _spell(kind: Any) -> Any:
    """The type in JSON of a field of this type."""
    if kind is str:
        return Text
    if get_origin(kind) in (Union, UnionType):
        return reduce(or_, map(_spell, get_args(kind)))
    if get_origin(kind) is not Annotated:
        return kind
    plain, *marks = get_args(kind)
    return reduce(_apply, marks, _spell(plain))


def _apply(kind: Any, mark: Any) -> Any:
    """`kind` with what a `mark` of its annotation says. Of lists, the first error is enough."""
    match mark:
        case Meta():
            return Annotated[kind, Field(max_length=mark.max_length, description=mark.description)]
        case Bounds():
            named = {"type": "integer" if int in (kind, *get_args(kind)) else "number"}
            return Annotated[kind, WithJsonSchema(named | range_of(mark))]
        case Texts(most):
            texts = texts_of(mark)
            form = WithJsonSchema({"anyOf": [texts["items"], texts]})
            few = Field(max_length=most, fail_fast=True)
            return Annotated[list[Text], few, BeforeValidator(_as_list), form]
        case Tokens(most):
            few = Field(max_length=most, fail_fast=True)
            return Annotated[list[int], few, WithJsonSchema(list_of(TOKEN, 0, most))]
        case Biases(most, bounds):
            form = WithJsonSchema(
                {
                    "type": "object",
                    "propertyNames": {"pattern": f"^[0-9]{{1,{_MAX_TOKEN_DIGITS}}}$"},
                    "additionalProperties": {"type": "number"} | range_of(bounds),
                    "maxProperties": most,
                }
            )
            few = Field(max_length=most)
            return Annotated[dict[str, float], few, AfterValidator(_by_token), form]


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _by_token(bias: dict[str, float]) -> dict[int, float]:
    spelled: dict[int, str] = {}
    for key in bias:
        if not (key.isascii() and key.isdecimal() and len(key) <= _MAX_TOKEN_DIGITS):
            shown = key[: 2 * _MAX_TOKEN_DIGITS]
            raise ValueError(f"the key {shown!r} must be a token id written in decimal digits")
        if (first := spelled.setdefault(int(key), key)) != key:
            raise ValueError(
                f"the keys {first!r} and {key!r} name the same token: send one of them"
            )
    return {token: bias[key] for token, key in spelled.items()}


class AnswerBody(Body):
    """What all bodies have that ask for an answer."""

    model: Text
    stream: bool = False
    user: Label | None = None
    prompt_cache_key: Label | None = None
    explain_reuse: bool = Field(
        default=False, description="the usage says why a prefix of the prompt was not reused"
    )

    @property
    def options(self) -> dict[str, Any]:
        """Its fields of `RequestOptions`."""
        return {name: value for name, value in vars(self).items() if name in _OPTIONS}

    @property
    def own_sampling(self) -> dict[str, Any]:
        """What it says of sampling in other words than `SamplingParams`."""
        return {}

    def sampling(self) -> SamplingParams:
        """Its fields of `SamplingParams`.

        Raises `RequestError` naming the first value that is out of range. It may ask for no token
        only if it `shows_prompt`.
        """
        stated = {name: value for name, value in vars(self).items() if name in _SAMPLING}
        sampling = SamplingParams(**stated | self.own_sampling)
        if sampling.max_tokens == 0 and not self.shows_prompt:
            TOKEN_COUNT.check("max_tokens", 0)
        return sampling

    @property
    def shows_prompt(self) -> bool:
        """Whether the answer has something of the prompt, so that it needs no token."""
        return False


class ReadAsChat:
    """What a body has that is read as one of the chat endpoint.

    `names_here` has the beginnings of that endpoint's names of fields, with the names here.
    """

    names_here: ClassVar[Mapping[str, str]]

    @property
    def completions(self) -> int:
        """How many completions the request asks for."""
        return 1

    def rename_field(self, field: str) -> str:
        """The name here of a field of the chat endpoint."""
        for name, here in self.names_here.items():
            if re.match(name, field):
                return re.sub(f"^{name}", here, field)
        return field

    def rename(self, error: RequestError) -> RequestError:
        """`error` with the names of this endpoint."""
        return error.rename(self.rename_field(error.field))


if TYPE_CHECKING:  # a type checker cannot read classes that are made: it knows what code here reads

    class ResponseFields(AnswerBody):
        """The described fields of `/v1/responses`."""

        cache_salt: str

    class MessagesFields(ResponseFields):
        """The described fields of `/v1/messages`."""

    class SamplingFields(ResponseFields):
        """The described fields of the other endpoints."""

        n: int
        logprobs: int | None
        prompt_logprobs: int | None
        max_tokens: int | None
        thinking_token_budget: int | None
else:
    ResponseFields = create_model(
        "ResponseFields",
        __base__=AnswerBody,
        **_describe_fields(RequestOptions),
        **_describe_fields(SamplingParams, *_RESPONSES),
    )
    MessagesFields = create_model(
        "MessagesFields", __base__=ResponseFields, **_describe_fields(SamplingParams, *_MESSAGES)
    )
    SamplingFields = create_model(
        "SamplingFields", __base__=ResponseFields, **_describe_fields(SamplingParams)
    )
