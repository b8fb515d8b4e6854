"""The limits of fields: Python API and server refuse the same values with the same text."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from reprlib import repr as shortened
from typing import get_type_hints

from tangram.errors import ConfigError, RequestError

MAX_SAMPLES = 128
MAX_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 1024
# Of all schemas of a request together: 200 tools of MCP servers have 0.7 MB, which takes a third of
# a second to make a grammar of.
MAX_TOOLS = 256
MAX_SCHEMA_BYTES = 2 << 20
MAX_SCHEMA_LEVELS = 64
MAX_PROPERTIES = 10_000
MAX_ENUM_VALUES = 10_000
MAX_PATTERN_CHARACTERS = 8000
MAX_MULTIPLES = 10_000

# Names that Transformers and the server pass to a chat template, and functions that templates call:
# no request may set these.
TEMPLATE_NAMES = frozenset(
    {
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
        *("chat_template", "conversation", "conversations", "compiled_template", "self"),
        *("tokenize", "tokenizer_kwargs", "sanitize_control_tokens"),
        *("return_assistant_tokens_mask", "return_tensors", "return_dict"),
        *("padding", "truncation", "max_length", "bos_token", "eos_token", "unk_token"),
        *("sep_token", "pad_token", "cls_token", "mask_token", "raise_exception", "strftime_now"),
        *("namespace", "dict", "range", "lipsum", "cycler", "joiner"),
    }
)


@dataclass(frozen=True)
class Bounds:
    """The range of a number. Both ends are finite and included; not the low end if `open_low`."""

    low: float
    high: float
    open_low: bool = False

    def check(self, field: str, value: float) -> None:
        """Raise `RequestError` if the `value` of `field` lies outside."""
        if not self._holds(value):
            bracket = "(" if self.open_low else "["
            limits = f"{bracket}{self.low}, {self.high}]"
            raise RequestError(
                lambda name: f"{name} is {shortened(value)}, it must lie in {limits}", field
            )

    def check_option(self, name: str, value: float, hint: str = "") -> None:
        """Raise `ConfigError` if the `value` of option `name` lies outside.

        `hint` names other values.
        """
        if self._holds(value):
            return
        low = f"{'greater than' if self.open_low else 'at least'} {_number(self.low)}"
        limit = f"{low} and at most {_number(self.high)}"
        raise ConfigError(f"{name} is {shortened(value)}, it must be {limit}{hint and ': '}{hint}")

    def _holds(self, value: float) -> bool:
        """False for NaN."""
        return (self.low < value if self.open_low else self.low <= value) and value <= self.high


def _number(value: float) -> str:
    return str(int(value) if value == int(value) else value)


@dataclass(frozen=True)
class Texts:
    """A list of at most `most` texts of up to `most_characters`; none is empty, as `empty` says."""

    most: int
    most_characters: int
    empty: str

    def check(self, field: str, value: Sequence[str]) -> None:
        """Raise `RequestError` if the `value` of `field` is no such list."""
        _check_count(f"{field} has {len(value)} strings", len(value), self.most, field)
        if any(not text for text in value):
            raise RequestError(f"{field} holds an empty string, {self.empty}: remove it", field)
        longest = max(map(len, value), default=0)
        characters = f"{field} has a string of {longest} characters"
        _check_count(characters, longest, self.most_characters, field)


@dataclass(frozen=True)
class Tokens:
    """At most `most` token ids. Which are known, the engine says."""

    most: int

    def check(self, field: str, value: Collection[int]) -> None:
        """Raise `RequestError` if the `value` of `field` has more."""
        _check_count(f"{field} has {len(value)} tokens", len(value), self.most, field)


@dataclass(frozen=True)
class Biases:
    """A bias within `bounds` for each of at most `most` token ids."""

    most: int
    bounds: Bounds

    def check(self, field: str, value: Mapping[int, float]) -> None:
        """Raise `RequestError` if the `value` of `field` has more, or one out of bounds."""
        _check_count(f"{field} names {len(value)} tokens", len(value), self.most, field)
        for token, bias in value.items():
            self.bounds.check(f"{field}[{token}]", bias)


def _check_count(found: str, count: int, most: int, field: str) -> None:
    if count > most:
        raise RequestError(f"{found}, at most {most} are allowed", field)


Limit = Bounds | Texts | Tokens | Biases
TEMPERATURE = Bounds(0.0, 100.0)
TOKEN_COUNT = Bounds(1, 2**31 - 1)


def limits_of(described: type) -> Mapping[str, Limit]:
    """The limits in the annotations of a class, by field."""
    hints = get_type_hints(described, include_extras=True)
    return {
        name: mark
        for name, hint in hints.items()
        for mark in getattr(hint, "__metadata__", ())
        if isinstance(mark, Limit)
    }


SERVED_QUEUE = 1024  # max_queue of a server: clients are many, and none sees the queue


def check_size(
    texts: Iterable[str], field: str, max_model_len: int, longest_token_bytes: int
) -> None:
    """Raise `RequestError` for texts of `field` that do not fit the model in any tokenization.

    Tokenizing megabytes takes seconds, so texts that could never fit are refused first.
    """
    size, most = sum(len(text.encode()) for text in texts), max_model_len * longest_token_bytes
    if size > most:
        message = (
            f"{field} has {size} bytes of text, {max_model_len} tokens (max_model_len) hold at "
            f"most {most}"
        )
        raise RequestError(f"{message}: shorten it", field)
