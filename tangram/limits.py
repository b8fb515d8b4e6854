"""The ranges of request fields: Python API and server refuse the same values with the same text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from reprlib import repr as shortened
from typing import TYPE_CHECKING

from tangram.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from tangram.types import SamplingParams

MAX_SAMPLES = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256  # each new token is compared with every beginning of every stop string
MAX_STOP_TOKEN_IDS = 1024
MAX_BIASES = 1024
MAX_SALT_CHARACTERS = 1024  # they are hashed at each attempt to admit a request

# Names that Transformers and the server pass to a chat template, and functions that templates call:
# no request may set these.
TEMPLATE_NAMES = frozenset(
    {
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
        *("chat_template", "conversation", "conversations", "compiled_template", "self"),
        *(
            "tokenize",
            "tokenizer_kwargs",
            "sanitize_control_tokens",
            "return_assistant_tokens_mask",
        ),
        *("padding", "truncation", "max_length", "return_tensors", "return_dict"),
        *(
            "bos_token",
            "eos_token",
            "unk_token",
            "sep_token",
            "pad_token",
            "cls_token",
            "mask_token",
        ),
        *(
            "raise_exception",
            "strftime_now",
            "namespace",
            "dict",
            "range",
            "lipsum",
            "cycler",
            "joiner",
        ),
    }
)


@dataclass(frozen=True)
class Bounds:
    """The range of a number. Both ends are finite and included; not the low one if `open_low`."""

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


# By the fields of `SamplingParams`, in the order in which they are checked; None is always inside.
BOUNDS: Mapping[str, Bounds] = {
    "n": Bounds(1, MAX_SAMPLES),
    "temperature": Bounds(0.0, 100.0),
    "top_p": Bounds(0.0, 1.0, open_low=True),
    "min_p": Bounds(0.0, 1.0),
    "repetition_penalty": Bounds(0.01, 10.0),  # logits are divided by it: float32 has an end
    "presence_penalty": Bounds(-2.0, 2.0),
    "frequency_penalty": Bounds(-2.0, 2.0),
    "top_k": Bounds(-1, 2**31 - 1),  # -1 and 0 switch the filter off
    "logprobs": Bounds(0, MAX_LOGPROBS),
    "max_tokens": Bounds(1, 2**31 - 1),
    "seed": Bounds(-(2**63), 2**63 - 1),
}
BIAS = Bounds(-100.0, 100.0)

# By the server's options: of `serve` and `deploy`, and of the arguments of `serve run`.
SERVER_BOUNDS: Mapping[str, Bounds] = {
    "max_body_mb": Bounds(0.0, 1024.0, open_low=True),
    "request_timeout_s": Bounds(0.0, 1e9, open_low=True),
    "shutdown_grace_s": Bounds(0.0, 1e6),
    "replicas": Bounds(1, 4096),
    "cpus_per_replica": Bounds(0.0, 4096.0),
    "gpus_per_replica": Bounds(0.0, 4096.0),
    "report_every_s": Bounds(0.0, 3600.0, open_low=True),
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


def check_sampling(params: SamplingParams) -> None:
    """Raise `RequestError` naming the first field that is out of range."""
    for field, bounds in BOUNDS.items():
        if (value := getattr(params, field)) is not None:
            bounds.check(field, value)
    Bounds(0, BOUNDS["max_tokens"].high if params.max_tokens is None else params.max_tokens).check(
        "min_tokens", params.min_tokens
    )
    if params.min_tokens and params.stop:
        message = (
            f"min_tokens is {params.min_tokens} and stop has texts, which could end an answer "
            "before: send one"
        )
        raise RequestError(message, "min_tokens")
    if len(params.stop) > MAX_STOP_STRINGS:
        raise RequestError(
            f"stop has {len(params.stop)} strings, at most {MAX_STOP_STRINGS} are allowed", "stop"
        )
    if any(not text for text in params.stop):
        raise RequestError(
            "stop holds an empty string, it would end every answer at once: remove it", "stop"
        )
    longest = max(map(len, params.stop), default=0)
    if longest > MAX_STOP_CHARACTERS:
        raise RequestError(
            f"stop has a string of {longest} characters, at most {MAX_STOP_CHARACTERS} are allowed",
            "stop",
        )
    if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        message = (
            f"stop_token_ids has {len(params.stop_token_ids)} tokens, at most {MAX_STOP_TOKEN_IDS} "
            "are allowed"
        )
        raise RequestError(message, "stop_token_ids")
    if len(params.logit_bias) > MAX_BIASES:
        message = (
            f"logit_bias names {len(params.logit_bias)} tokens, at most {MAX_BIASES} are allowed"
        )
        raise RequestError(message, "logit_bias")
    for token, bias in params.logit_bias.items():
        BIAS.check(f"logit_bias[{token}]", bias)
