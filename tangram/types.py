"""The types that packages share. No torch here.

Shape letters used everywhere:

    L  layers (with KV)   H  KV heads of a layer   Q  query heads of a layer   G = Q/H
    D  head dim           P  tokens per page       Hp heads per page           C  tokens per chunk
    R  rows of a step     T  tokens of a step
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field, fields, replace
from enum import StrEnum
from typing import Annotated, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from tangram.errors import RequestError
from tangram.limits import (
    MAX_LOGPROBS,
    MAX_SAMPLES,
    MAX_STOP_TOKEN_IDS,
    TEMPERATURE,
    TOKEN_COUNT,
    Biases,
    Bounds,
    Texts,
    Tokens,
    limits_of,
)

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
UInt8 = npt.NDArray[np.uint8]
Float64 = npt.NDArray[np.float64]
FP8_MAX = 448.0  # the largest finite E4M3 value
# The scales of a cache of 8 bits, [L][H]: of a KV head's keys and of its values.
HeadScales = tuple[tuple[tuple[float, float], ...], ...]


class LayerHeads(NamedTuple):
    """The heads of one layer."""

    kv_heads: int
    query_heads: int
    head_dim: int

    @property
    def group_size(self) -> int:
        """G, query heads per KV head."""
        return self.query_heads // self.kv_heads


@dataclass(frozen=True)
class Geometry:
    """The shape of a model's attention, read from the model itself.

    A layer that reads the keys and values of an earlier one stores none. `kv_layers` has it; no
    other field counts it.
    """

    layers: int
    kv_heads: int
    query_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    # One entry a layer: the sliding window in tokens (a query sees itself and W-1 before it), None
    # = full.
    windows: tuple[int | None, ...]
    # Latent attention: the first `value_dim` elements of a key are its value, too. None = an entry
    # has a value of its own, of head_dim elements.
    value_dim: int | None = None
    # For each layer of the model the number of the layer above whose keys and values it reads: the
    # first of several with one number stores them. None = it reads none, as recurrent layers. Empty
    # = each has its own.
    kv_layers: tuple[int | None, ...] = ()
    # What recurrent layers keep of a sequence instead, whatever its length.
    state_bytes: int = 0
    # Windows do not slide: a query at position p sees those from p // W * W on (Llama 4). All have
    # one size.
    chunked: bool = False
    # The heads of layers with a window, where they are others than those above (Gemma 4).
    window_heads: LayerHeads | None = None

    def heads_of(self, layer: int) -> LayerHeads:
        """The heads of one of the layers above."""
        if self.window_heads is None or self.windows[layer] is None:
            return LayerHeads(self.kv_heads, self.query_heads, self.head_dim)
        return self.window_heads

    @property
    def takes_scales(self) -> bool:
        """Whether profiles have scales for a pool of 8 bits: of latents and of other heads none."""
        return self.value_dim is None and self.window_heads is None

    @property
    def most_kv_heads(self) -> int:
        """The most KV heads of a layer: the H of arrays over layers and heads."""
        return max((self.heads_of(layer).kv_heads for layer in range(self.layers)), default=0)

    def find_layer(self, number: int) -> tuple[int, bool]:
        """The layer above that layer `number` of the model reads, and whether an earlier one
        stores it.

        Raises `ValueError` if it reads none.
        """
        found = self.kv_layers[number] if self.kv_layers else number
        if found is None:
            raise ValueError(f"layer {number} has no keys and values")
        return found, found in self.kv_layers[:number]

    @property
    def entry_vectors(self) -> int:
        """Vectors of head_dim elements in an entry: a key and a value, or one that is both."""
        return 2 if self.value_dim is None else 1

    @property
    def entry_elements(self) -> int:
        """Elements of an entry: what one KV head stores for one token."""
        return self.entry_vectors * self.head_dim

    @property
    def group_size(self) -> int:
        """G, query heads per KV head."""
        return self.query_heads // self.kv_heads

    @property
    def full_layers(self) -> tuple[int, ...]:
        """The layers that see the whole context: the only ones that are compressed."""
        return tuple(layer for layer, window in enumerate(self.windows) if window is None)


_MODELS_OWN = Meta(description="default: the model's own")


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen. Names and meaning as in vLLM and the OpenAI API.

    None leaves a value to the model's defaults (`SamplingValues`): temperature, filters,
    penalties and `max_tokens`. `seed` makes a request reproducible whatever else is in the batch.
    `logprobs` is the number of alternatives reported beside the sampled token (0 = the sampled
    token only, None = nothing), `prompt_logprobs` the same of the prompt. With `max_tokens` 0 the
    prompt is all that is computed. No end token comes before `min_tokens`. Ranges are checked on
    construction (`RequestError`).

    These annotations describe the fields of requests, too: what a body may have, its limits and
    the API's document follow from them.
    """

    n: Annotated[int, Bounds(1, MAX_SAMPLES)] = 1
    temperature: Annotated[float | None, TEMPERATURE, _MODELS_OWN] = None
    top_k: Annotated[
        int | None,
        Bounds(-1, 2**31 - 1),
        Meta(description=f"-1 and 0 switch the filter off; {_MODELS_OWN.description}"),
    ] = None
    top_p: Annotated[float | None, Bounds(0.0, 1.0, open_low=True), _MODELS_OWN] = None
    min_p: Annotated[float | None, Bounds(0.0, 1.0), _MODELS_OWN] = None
    # Logits are divided by it: float32 has an end.
    repetition_penalty: Annotated[float | None, Bounds(0.01, 10.0), _MODELS_OWN] = None
    presence_penalty: Annotated[float | None, Bounds(-2.0, 2.0), _MODELS_OWN] = None
    frequency_penalty: Annotated[float | None, Bounds(-2.0, 2.0), _MODELS_OWN] = None
    logit_bias: Annotated[
        dict[int, float],
        Biases(1024, Bounds(-100.0, 100.0)),
        Meta(description="token id, as a string, to bias"),
    ] = field(default_factory=dict)
    # Each new token is compared with every beginning of every text.
    stop: Annotated[str | Sequence[str], Texts(16, 256, "it would end every answer at once")] = ()
    stop_token_ids: Annotated[Sequence[int], Tokens(MAX_STOP_TOKEN_IDS)] = ()
    ignore_eos: bool = False
    seed: Annotated[int | None, Bounds(-(2**63), 2**63 - 1)] = None
    logprobs: Annotated[int | None, Bounds(0, MAX_LOGPROBS)] = None
    prompt_logprobs: Annotated[
        int | None,
        Bounds(0, MAX_LOGPROBS),
        Meta(description="alternatives for each prompt token, as `logprobs` for the answer's"),
    ] = None
    max_tokens: Annotated[int | None, Bounds(0, TOKEN_COUNT.high)] = 16
    min_tokens: Annotated[int, Bounds(0, TOKEN_COUNT.high)] = 0
    thinking_token_budget: Annotated[
        int | None, Bounds(0, TOKEN_COUNT.high), Meta(description="the most tokens of a thought")
    ] = None
    skip_special_tokens: Annotated[
        bool, Meta(description="false: the answer's special tokens are in its text, by name")
    ] = True

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        )
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for name, limit in SAMPLING_LIMITS.items():
            if (value := getattr(self, name)) is not None:
                limit.check(name, value)
        if self.max_tokens is not None:
            Bounds(0, self.max_tokens).check("min_tokens", self.min_tokens)
        if self.min_tokens and self.stop:
            message = (
                f"min_tokens is {self.min_tokens} and stop has texts, which could end an answer "
                "before: send one"
            )
            raise RequestError(message, "min_tokens")

    @property
    def named_tokens(self) -> Iterator[tuple[str, Collection[int]]]:
        """The token ids in each field that has some."""
        return ((name, getattr(self, name)) for name in _TOKEN_FIELDS)

    @classmethod
    def state_all(cls, **values: Any) -> SamplingParams:
        """Params that leave nothing to the model: `values`, and what has no effect for the others.

        For measurements, which must not depend on a model's defaults.
        """
        neutral = asdict(OPENAI_SAMPLING) | {"max_tokens": cls.max_tokens}
        return cls(**neutral | values)


SAMPLING_LIMITS = limits_of(SamplingParams)
_TOKEN_FIELDS = tuple(
    name for name, limit in SAMPLING_LIMITS.items() if isinstance(limit, Tokens | Biases)
)


@dataclass(frozen=True)
class SamplingValues:
    """How tokens are chosen: what holds where requests state nothing, or for one request.

    The defaults are OpenAI's, which hold for a model without values of its own. `temperature` 0 is
    greedy. `top_k` -1 and 0, `top_p` 1 and `min_p` 0 switch those filters off. `max_tokens` None
    means "until the context is full".
    """

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    max_tokens: int | None = None

    def with_stated(self, params: SamplingParams) -> SamplingValues:
        """The values that hold for a request of `params`: what these state, and the defaults."""
        values = {entry.name: getattr(params, entry.name) for entry in fields(self)}
        return replace(self, **{name: value for name, value in values.items() if value is not None})


OPENAI_SAMPLING = SamplingValues()


class FinishReason(StrEnum):
    """Why a completion ended, as the OpenAI API spells it."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class TokenLogprob(Struct, frozen=True, array_like=True, gc=False):
    """The log-probability of one token: `top` holds the best alternatives, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class PromptLogprobs(Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities of consecutive tokens of a prompt, as the bytes of arrays.

    `token_ids` int32 [n, 1 + k] and `logprobs` float32 [n, 1 + k] are of the prompt's own token,
    then of the k likeliest, best first. `ranks` int32 [n] are those of the own tokens: 1 is the
    likeliest.
    """

    token_ids: bytes
    logprobs: bytes
    ranks: bytes

    def read(self) -> Iterator[tuple[TokenLogprob, int]]:
        """Each token, and its rank."""
        ranks: list[int] = np.frombuffer(self.ranks, np.int32).tolist()
        shape = len(ranks), -1
        token_ids = np.frombuffer(self.token_ids, np.int32).reshape(shape).tolist()
        logprobs = np.frombuffer(self.logprobs, np.float32).reshape(shape).tolist()
        for (own, *others), (logprob, *values), rank in zip(
            token_ids, logprobs, ranks, strict=True
        ):
            top = tuple(pair for pair in zip(others, values, strict=True) if pair[1] > -math.inf)
            yield TokenLogprob(own, logprob, top), rank


class ChosenToken(Struct, frozen=True, gc=False):
    """A token that the model goes on with; `logprob` for a request that asks for it."""

    token_id: int
    logprob: TokenLogprob | None = None


class DraftedTokens(Struct, frozen=True, array_like=True, gc=False):
    """The tokens that were drafted for a completion: those that are in it, and the others."""

    accepted: int
    rejected: int


class Usage(Struct, frozen=True, array_like=True, gc=False):
    """The cost of one finished (or running) completion.

    `kv_bytes` is the size of its KV pages, `kv_bytes_uncompressed` that of the same tokens with
    nothing dropped. `drafted` is None where the engine does not speculate.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    kv_bytes: int
    kv_bytes_uncompressed: int
    drafted: DraftedTokens | None = None


class LossReason(StrEnum):
    """Why the prefix cache had less of a prompt than an earlier conversation had left there.

    The prompt differs from it, pages were evicted, or the recurrent state behind the pages was not
    kept.
    """

    DIVERGED = "diverged"
    EVICTED = "evicted"
    STATELESS = "stateless"


MOST_SHOWN = 24  # tokens from the first that differs


class LostPrefix(Struct, frozen=True, array_like=True, gc=False):
    """So many `tokens` of a prompt an earlier conversation of the client had left in the cache.

    If the prompt has diverged, `at` is the first token that differs, and `known` are the
    conversation's from there on, at most `MOST_SHOWN`.
    """

    reason: LossReason
    tokens: int
    at: int = 0
    known: tuple[int, ...] = ()


class Event(Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """New tokens of one completion (`index` of `n`), and the end if it came.

    `tangram.engine.text.answer_text` makes text of them. `admitted_s`, of the monotonic clock, is
    when it left the queue; None if it never did. The first event has what the prompt has `lost`,
    and that of the first completion the `prompt_logprobs`, of all tokens but the first.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    usage: Usage
    finish_reason: FinishReason | None = None
    error: str | None = (
        None  # set with finish_reason ABORT when the engine, not the client, ended it
    )
    admitted_s: float | None = None
    error_field: str | None = None  # the wrong field if the request is the reason
    may_retry: bool = False  # with `error`: the same request may succeed if it is sent again
    lost: LostPrefix | None = None
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()


class Matcher(Protocol):
    """The place of one completion in its grammar.

    `error` says why it cannot continue; None while it can.
    """

    error: RequestError | None

    def mask_tokens(self) -> UInt8:
        """[n], at least as many bits as tokens: bit i % 8 of byte i // 8 allows token i.

        Where the grammar is complete only the ends of text are allowed. After an error the mask is
        undefined.
        """

    def take(self, token: int) -> None:
        """Advance by `token`."""


class Grammar(Protocol):
    """The compiled grammar of a request's answers; any number of completions may follow it.

    It is of the text `source`, in the field `field` of the request.
    """

    source: str
    field: str

    def begin(self) -> Matcher:
        """The state of a completion that has no token yet."""


class CallStyle(StrEnum):
    """How a call writes its arguments."""

    OBJECT = "in one JSON object with the name"
    NAMED = "a JSON object after the name"
    TAGGED = "a tag for each, values without quotes"
    PYTHON = "as keyword arguments of Python, values as Python or JSON has them"
    QUOTED = "in braces, names bare, texts between marks"
    CHANNEL = "the text of a message to the function, a JSON object"


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes tool calls: `begin`, a call or several, `end`.

    `call` is one call. In it `$name` stands for the function, `$index` for the call's number,
    `$callid` for a mark and an id that may be there, and `$arguments` for what `style` says, where
    each argument is `argument` (of `$key`, `$value` and `$string`, `true` for a text, else `false`)
    and texts are between `quote`. With `brackets` calls stand between these and share their marks;
    otherwise each has its own. If `begin` is empty the answer is calls only. Otherwise text may
    come before it, and more calls after it. If `end` is empty a call ends where the next begins, or
    the answer ends.

    `ids` are the ids that the template takes: `$short` is nine letters and digits, empty is any.
    `told` is what a prompt with tools says of this format. With `text_arguments` the template takes
    past arguments as text, with `described` no tool without a description.
    """

    begin: str
    end: str
    call: str = '{"name": "$name", "arguments": $arguments}'
    style: CallStyle = CallStyle.OBJECT
    argument: str = ""
    quote: str = ""
    between: str = "\n"
    brackets: tuple[str, str] | None = None
    ids: str = ""
    told: str = ""
    text_arguments: bool = False
    described: bool = False

    def list_marks(self) -> tuple[str, ...]:
        """The texts that hold the marks of calls."""
        call = self.call.replace("$callid", "[CALL_ID]")
        inside = () if self.style is CallStyle.OBJECT else (call, self.argument, self.quote)
        return (self.begin, self.end, *inside)


@dataclass(frozen=True)
class ThinkingFormat:
    """How a model marks its thoughts before it answers: `begin`, the thought, `end`.

    With `channels` (Harmony) an answer is a list of messages, and those between these marks are
    thoughts. With `blocks` the template takes a past thought as a block of the message's content.
    `answer` are marks around the text of the answer; where the first is empty only the last comes.
    """

    begin: str
    end: str
    channels: bool = False
    blocks: bool = False
    answer: tuple[str, str] | None = None


@dataclass(frozen=True)
class Marks:
    """Tokens that mark calls and thoughts, each by its id: `names` are control tokens.

    In an answer each stands as a `Mark`. After one of `heads`, up to the next of them all, text is
    not searched for stop strings. `words` are ordinary tokens: their text is the mark, or the part
    of it that they spell. `thinking` is how the thoughts are marked.
    """

    names: Mapping[int, str] = field(default_factory=dict)
    heads: frozenset[int] = frozenset()
    words: Mapping[int, str] = field(default_factory=dict)
    thinking: ThinkingFormat | None = None


@dataclass(frozen=True)
class Mark:
    """A control token in an answer that marks a call or a thought, by its name."""

    name: str


# A part of an answer: text of ordinary tokens, which may spell the name of a mark, or a mark.
Piece = str | Mark


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """What a request asks of the KV cache and of drafting. None = as the engine does.

    Like those of `SamplingParams`, the annotations describe the fields of requests.
    """

    kv_retention: Annotated[
        float | None,
        Bounds(0.0, 1.0, open_low=True),
        Meta(description="fraction of the KV cache to keep, (0, 1]"),
    ] = None
    kv_scorer: Annotated[
        Annotated[str, Meta(max_length=64)] | None,
        Meta(description="which of the profiles of this kv_retention, by its scorer"),
    ] = None
    speculative: Annotated[bool | None, Meta(description="false: nothing is drafted")] = None
    cache_salt: Annotated[
        str,  # it is hashed at each attempt to admit a request
        Meta(
            max_length=1024,
            description="prefixes are reused only among requests with the same salt",
        ),
    ] = ""


_OPTIONS = tuple(entry.name for entry in fields(RequestOptions))


def ignore_event(event: Event) -> None:
    """Nobody listens."""


@dataclass(frozen=True)
class Request(RequestOptions):
    """One request of the engine: tokens in, events out through `on_event`.

    `on_event` is called on the engine's thread. With a `grammar` the completions follow it, until a
    limit cuts them. Of control tokens only `marks` are in the answers. The prompt is compared with
    earlier ones of the same `client`.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    on_event: Callable[[Event], None] = ignore_event
    _: KW_ONLY
    grammar: Grammar | None = None
    marks: Marks = field(default_factory=Marks)
    client: bytes = b""

    @property
    def options(self) -> RequestOptions:
        """Its options alone."""
        return RequestOptions(**{name: getattr(self, name) for name in _OPTIONS})

    def check_length(self, max_model_len: int) -> None:
        """Raise `RequestError` if the prompt leaves no room for a token."""
        tokens = len(self.prompt_token_ids)
        if tokens >= max_model_len:
            raise RequestError(
                lambda field: (
                    f"{field} has {tokens} tokens, at most {max_model_len - 1} and one "
                    f"generated fit here (max_model_len {max_model_len}): shorten it"
                ),
                "prompt",
            )


@dataclass(frozen=True, eq=False)
class PageMove:
    """Copies of whole pages between the pool and host memory.

    `pages` int32 [n] are of the pool, `slots` int32 [n] of host memory. `inward` copies fill pages;
    the others leave them unchanged. With `slots` None pages are filled with zeros.
    """

    pages: Int32
    slots: Int32 | None
    inward: bool


@dataclass(frozen=True)
class LinkName:
    """The name of a link on disk: its prefix key, and that of the first chunk of its chain."""

    root: bytes
    key: bytes


@dataclass(frozen=True, eq=False)
class PageSave:
    """`pages` int32 [n] of the pool, unchanged, are the link `name`, which is written to disk."""

    pages: Int32
    name: LinkName


@dataclass(frozen=True, eq=False)
class HostFill:
    """`slots` int32 [n] of host memory get `words` int32 [n, words of a page], read from disk."""

    slots: Int32
    words: Int32


@dataclass(frozen=True, eq=False)
class LinkTouch:
    """The links of `names`, parents before their children, are in use; the disk is told."""

    names: Sequence[LinkName]


Move = PageMove | PageSave | HostFill | LinkTouch


@dataclass(frozen=True, eq=False)
class StateLoad:
    """The sequence in `slot` begins with the recurrent state in `pages` int32 [n], None = zeros."""

    slot: int
    pages: Int32 | None
