"""The fields of a body that asks for an answer: those that `tangram/types.py` describes, in JSON.

A field that is described there is in the bodies, and in the document of the API.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, Field, fields
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin, get_type_hints

import pydantic
from msgspec import Meta
from pydantic import AfterValidator, BeforeValidator, WithJsonSchema, create_model

from tangram.limits import TOKEN_COUNT, Biases, Bounds, Texts, Tokens
from tangram.serve.body import Body, Json, Label, Text
from tangram.types import RequestOptions, SamplingParams

_MAX_TOKEN_DIGITS = 10
_OPTIONS = {entry.name for entry in fields(RequestOptions)}
_SAMPLING = {entry.name for entry in fields(SamplingParams)}
_RESPONSES = ("temperature", "top_p")  # what `/v1/responses` has of `SamplingParams`


def range_of(bounds: Bounds) -> Json:
    """`bounds` as a JSON schema says them."""
    low = "exclusiveMinimum" if bounds.open_low else "minimum"
    return {low: bounds.low, "maximum": bounds.high}


def list_of(items: Json, least: int, most: int) -> Json:
    """The JSON schema of a list."""
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


# The vocabulary depends on the model; none is larger than this.
TOKEN: Json = {"type": "integer", "minimum": 0, "maximum": TOKEN_COUNT.high}
MaxTokens = Annotated[int, WithJsonSchema({"type": "integer"} | range_of(TOKEN_COUNT))]


def _describe_fields(described: type, *names: str) -> dict[str, Any]:
    """The fields of a dataclass, or those of `names`, as `create_model` takes them."""
    hints = get_type_hints(described, include_extras=True)
    found = {entry.name: entry for entry in fields(described)}
    return {name: _describe(hints[name], found[name]) for name in names or found}


def _describe(hint: Any, entry: Field[Any]) -> tuple[Any, Any]:
    marks = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    texts = [mark.description for mark in marks if isinstance(mark, Meta) and mark.description]
    value = entry.default if entry.default_factory is MISSING else entry.default_factory()
    return _spell(hint), pydantic.Field(default=value, description=texts[0] if texts else None)


def _spell(kind: Any, marks: Sequence[Any] = ()) -> Any:
    """The type in JSON of a field of this type, whose annotations are `marks`."""
    if get_origin(kind) is Annotated:
        kind, *own = get_args(kind)
        return _spell(kind, [*own, *marks])
    for mark in marks:
        match mark:
            case Texts(most, most_characters):
                text = {"type": "string", "minLength": 1, "maxLength": most_characters}
                form = {"anyOf": [text, list_of(text, 0, most)]}
                return Annotated[_list(list[Text], most, form), BeforeValidator(_as_list)]
            case Tokens(most):
                return _list(list[int], most, list_of(TOKEN, 0, most))
            case Biases():
                return _spell_biases(mark)
    if get_origin(kind) in (Union, UnionType):  # of a type and None
        return _spell(get_args(kind)[0], marks) | None
    if kind is str:
        lengths = [mark.max_length for mark in marks if isinstance(mark, Meta)]
        return Annotated[Text, pydantic.Field(max_length=next(filter(None, lengths), None))]
    ranges = [range_of(mark) for mark in marks if isinstance(mark, Bounds)]
    if ranges:
        named = {"type": "integer" if kind is int else "number"}
        return Annotated[kind, WithJsonSchema(named | ranges[0])]
    return kind


def _list(kind: Any, most: int, form: Json) -> Any:
    # The first error is enough; many would take much memory.
    return Annotated[kind, pydantic.Field(max_length=most, fail_fast=True), WithJsonSchema(form)]


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _spell_biases(limit: Biases) -> Any:
    form = {
        "type": "object",
        "propertyNames": {"pattern": f"^[0-9]{{1,{_MAX_TOKEN_DIGITS}}}$"},
        "additionalProperties": {"type": "number"} | range_of(limit.bounds),
        "maxProperties": limit.most,
    }
    return Annotated[
        dict[str, float],
        pydantic.Field(max_length=limit.most),
        AfterValidator(_by_token),
        WithJsonSchema(form),
    ]


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

        Raises `RequestError` naming the first value that is out of range.
        """
        stated = {name: value for name, value in vars(self).items() if name in _SAMPLING}
        return SamplingParams(**stated | self.own_sampling)


if TYPE_CHECKING:  # a type checker cannot read classes that are made: it knows what code here reads

    class ResponseFields(AnswerBody):
        """The described fields of `/v1/responses`."""

    class SamplingFields(ResponseFields):
        """The described fields of the other endpoints."""

        n: int
        logprobs: int | None
        max_tokens: int | None
else:
    ResponseFields = create_model(
        "ResponseFields",
        __base__=AnswerBody,
        **_describe_fields(RequestOptions),
        **_describe_fields(SamplingParams, *_RESPONSES),
    )
    SamplingFields = create_model(
        "SamplingFields", __base__=ResponseFields, **_describe_fields(SamplingParams)
    )
