"""The base of all request bodies: strict types, no unknown fields, valid Unicode, bounds."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import chain
from typing import Annotated, Any, ClassVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationInfo,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema

from tangram.serve.bodies.unsupported import NoOps, drop_no_ops, without_unknown, wrong_field

Json = dict[str, Any]  # a JSON object

_MAX_FIELDS = 128
# Tags of alternatives begin with this. No field does, so paths of fields can leave them out.
ALTERNATIVE = "alternative "
_MAX_LABEL_CHARACTERS = 1024


def encodable(text: Any) -> Any:
    """The text itself. Raises `ValueError` for half of a surrogate pair.

    JSON can spell a half, but UTF-8 cannot, and no tokenizer can read it.
    """
    try:
        if isinstance(text, str):
            text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"holds half a surrogate pair at character {error.start}, which is not unicode text"
        ) from None
    return text


# The type of every text in a request. A text that is only echoed or logged is a `Label`, or has a
# bound of its own.
Text = Annotated[str, BeforeValidator(encodable)]
Label = Annotated[
    Text, Field(max_length=_MAX_LABEL_CHARACTERS, description="a label, without effect")
]

Note = Annotated[
    dict[str, Any] | None,
    Field(description="a note, without effect: prefixes are cached without it"),
]

# As OpenAI bounds them: pairs, and characters of keys and values.
Metadata = Annotated[
    dict[Annotated[Text, Field(max_length=64)], Annotated[Text, Field(max_length=512)]],
    Field(max_length=16, description="labels, without effect"),
]


class Body(BaseModel):
    """A request body: types are strict, and an explicit null means the default.

    Unknown fields are refused, unless the validation's context is an `IgnoredFields`. A field with
    too many items is refused before pydantic looks at any of them.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    refused: ClassVar[NoOps] = {}

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        """What a body has it does not refuse."""
        kept = cls.refused.keys() - cls.model_fields.keys()
        cls.refused = {name: cls.refused[name] for name in kept}

    @model_validator(mode="before")
    @classmethod
    def _null_is_default(cls, body: Any, info: ValidationInfo) -> Any:
        if (
            isinstance(body, dict) and len(body) > _MAX_FIELDS
        ):  # each would become an error, with all its data
            raise ValueError(f"there are {len(body)} fields, at most {_MAX_FIELDS} are allowed")
        if not isinstance(body, dict):
            return body
        known = {field.alias or name: field for name, field in cls.model_fields.items()}
        for name in known.keys() & body.keys():
            _refuse_many(name, body[name], known[name])
        body = drop_no_ops(without_unknown(body, known, cls.refused, info.context), cls.refused)
        return {
            name: value for name, value in body.items() if value is not None or name not in known
        }


def _refuse_many(name: str, value: Any, field: FieldInfo) -> None:
    for constraint in field.metadata if isinstance(value, (list, dict)) else ():
        most = getattr(constraint, "max_length", None)
        if most is not None and len(value) > most:
            kind = "list" if isinstance(value, list) else "dictionary"
            message = f"'{name}' is a {kind} of {len(value)} items, at most {most} are allowed"
            raise wrong_field(name, message)


def name_alternative(value: Any, kinds: Collection[str], other: str) -> str:
    """The tag of `value` among alternatives: its type, or `other` if that is none of `kinds`."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"{ALTERNATIVE}{kind if isinstance(kind, str) and kind in kinds else other}"


class TypeOnly(Body):
    """What is left out of a prompt, and only named in the answer."""

    type: str

    @model_validator(mode="before")
    @classmethod
    def _keep_the_type(cls, given: Any) -> Any:
        return {"type": given["type"]} if isinstance(given, dict) else given


class OrText:
    """Says in the schema of a list that a text may stand for it."""

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> Json:
        return {"anyOf": [{"type": "string"}, handler(core)]}


def describe_object(**fields: Json) -> Json:
    """The JSON schema of an object that has these fields alone."""
    required = {"type": "object", "required": list(fields)}
    return required | {"properties": fields, "additionalProperties": False}


def deeper_than(value: Any, levels: int) -> bool:
    """Whether a JSON value is nested in more than `levels` levels."""
    level = [value]
    for _ in range(levels + 1):
        level = [
            item for outer in level if isinstance(outer, (dict, list)) for item in _items(outer)
        ]
        if not level:
            return False
    return True


def _items(container: dict[str, Any] | list[Any]) -> list[Any]:
    return list(container.values()) if isinstance(container, dict) else container


def texts_in(value: Any) -> Iterator[str]:
    """All texts in a JSON value, names of fields too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for item in chain(value, value.values()) if isinstance(value, dict) else value:
            yield from texts_in(item)
