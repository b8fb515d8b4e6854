"""The request bodies of the OpenAI API, with vLLM's sampling extras and ours. Unknown fields are refused."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveInt,
    field_validator,
    model_validator,
)

from tangram.limits import MAX_BIASES, MAX_LOGPROBS
from tangram.serve.unsupported import CHAT, COMPLETION, MESSAGE, STREAM_OPTIONS, NoOps, drop_no_ops, wrong_field
from tangram.types import SamplingParams

MAX_PROMPTS = 1024
MAX_MESSAGES = 4096
MAX_COMPLETIONS = 1024
_MAX_FIELDS = 128
_MAX_TOKEN_DIGITS = 10


def _encodable(text: str) -> str:
    """JSON can spell half a surrogate pair, which no tokenizer can read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"holds half a surrogate pair at character {error.start}, which is not Unicode text") from None
    return text


Text = Annotated[str, AfterValidator(_encodable)]


class Body(BaseModel):
    """Strict types, no unknown fields; an explicit null means the default."""

    model_config = ConfigDict(extra="forbid", strict=True)
    refused: ClassVar[NoOps] = {}

    @model_validator(mode="before")
    @classmethod
    def _null_is_default(cls, body: Any) -> Any:
        if isinstance(body, dict) and len(body) > _MAX_FIELDS:  # each would become an error, with all its data
            raise ValueError(f"there are {len(body)} fields, at most {_MAX_FIELDS} are allowed")
        body = drop_no_ops(body, cls.refused)
        if not isinstance(body, dict):
            return body
        return {name: value for name, value in body.items() if value is not None or name not in cls.model_fields}


def text_of_parts(content: Any) -> Any:
    """A message's content as one string: text parts are joined by newlines, other parts are refused."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" and isinstance(kind, str):
            raise ValueError(f"parts of type {kind!r} are not supported: this model reads text parts only")
        if kind != "text" or part.keys() != {"type", "text"} or not isinstance(part["text"], str):
            raise ValueError('a content part must be {"type": "text", "text": "..."}')
        texts.append(part["text"])
    return "\n".join(texts)


class ChatMessage(Body):
    """One message of a conversation. `name` goes to the chat template, which may or may not show it to the model."""

    refused = MESSAGE
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[Text, BeforeValidator(text_of_parts)]
    name: Text | None = None

    @field_validator("role", mode="before")
    @classmethod
    def _no_tools(cls, role: Any) -> Any:
        if role in ("tool", "function"):
            raise ValueError(f"{role!r} is not supported: it needs tools, which this server does not have")
        return role

    def for_template(self) -> dict[str, str]:
        """The message as chat templates read it: `developer` is the newer name of `system`."""
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": self.content} | ({"name": self.name} if self.name is not None else {})


class StreamOptions(Body):
    """`include_usage` adds a last chunk with the usage of the whole request.

    With `continuous_usage_stats`, too, every chunk before it has what its choice has used so far, as in vLLM.
    """

    refused = STREAM_OPTIONS
    include_usage: bool = False
    continuous_usage_stats: bool = False


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _few_biases(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise ValueError(f"names {len(value)} tokens, at most {MAX_BIASES} are allowed")
    return value


class _Sampled(Body):
    """The fields of both endpoints."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = Field(default=-1, description="-1 and 0 switch the filter off")
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Annotated[dict[str, float], BeforeValidator(_few_biases)] = Field(
        default={}, description="token id, as a string, to bias"
    )
    # The first error is enough: millions of them would take gigabytes.
    stop: Annotated[list[Text], Field(fail_fast=True), BeforeValidator(_as_list)] = []
    stop_token_ids: list[int] = Field(default=[], fail_fast=True)
    ignore_eos: bool = False
    seed: int | None = None
    max_tokens: int | None = None
    kv_retention: float | None = Field(default=None, description="fraction of the KV cache to keep, (0, 1]")
    cache_salt: Text = Field(default="", description="prefixes are reused only among requests with the same salt")
    user: str | None = Field(default=None, description="a label, without effect")

    @field_validator("logit_bias")
    @classmethod
    def _keys_are_token_ids(cls, bias: dict[str, float]) -> dict[str, float]:
        for key in bias:
            if not (key.isascii() and key.isdecimal() and len(key) <= _MAX_TOKEN_DIGITS):
                shown = key[: 2 * _MAX_TOKEN_DIGITS]
                raise ValueError(f"the key {shown!r} must be a token id written in decimal digits")
        return bias

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise wrong_field("stream_options", "'stream_options' is allowed only when 'stream' is true")
        return self

    def _sampling(self, *, logprobs: int | None, max_tokens: int | None) -> SamplingParams:
        return SamplingParams(
            n=self.n,
            temperature=self.temperature,
            top_k=None if self.top_k in (-1, 0) else self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias={int(token): bias for token, bias in self.logit_bias.items()},
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            seed=self.seed,
            logprobs=logprobs,
            max_tokens=max_tokens,
        )


class ChatRequest(_Sampled):
    """The body of POST /v1/chat/completions. Without a token limit an answer may fill the context."""

    refused = CHAT
    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    max_completion_tokens: PositiveInt | None = None
    safety_identifier: str | None = Field(default=None, description="a label, without effect")

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise wrong_field("top_logprobs", "'top_logprobs' is allowed only when 'logprobs' is true")
        newer, older = self.max_completion_tokens, self.max_tokens
        if newer is not None and older is not None and newer != older:
            message = (
                f"'max_completion_tokens' is {newer} and 'max_tokens', its older name, is {older}: send one of them"
            )
            raise wrong_field("max_completion_tokens", message)
        return self

    def sampling(self) -> SamplingParams:
        """Raises `RequestError` naming the first value that is out of range."""
        return self._sampling(
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            max_tokens=self.max_tokens if self.max_tokens is not None else self.max_completion_tokens,
        )


def _as_prompts(value: Any) -> list[str | list[int]]:
    """The four forms of a prompt (text, texts, token ids, lists of token ids) as a list of prompts."""
    prompts = value if isinstance(value, list) and not _is_token_ids(value) else [value]
    if not prompts or not all(isinstance(prompt, str) or _is_token_ids(prompt) for prompt in prompts):
        raise ValueError("must be a string, a list of strings, a list of token ids or a list of lists of token ids")
    if len(prompts) > MAX_PROMPTS:
        raise ValueError(f"holds {len(prompts)} prompts, at most {MAX_PROMPTS} are allowed")
    for text in filter(lambda prompt: isinstance(prompt, str), prompts):
        _encodable(text)
    return prompts


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


class CompletionRequest(_Sampled):
    """The body of POST /v1/completions. `logprobs` is the number of alternatives reported beside each token."""

    refused = COMPLETION
    prompt: Annotated[list[str | list[int]], BeforeValidator(_as_prompts)]
    logprobs: int | None = None
    max_tokens: int | None = 16
    echo: bool = Field(default=False, description="begin the text with the prompt")

    @model_validator(mode="after")
    def _not_too_many(self) -> Self:
        if len(self.prompt) * self.n > max(MAX_COMPLETIONS, self.n):
            message = f"n is {self.n} for {len(self.prompt)} prompts: at most {MAX_COMPLETIONS} completions are allowed"
            raise wrong_field("n", message)
        return self

    @model_validator(mode="after")
    def _prompts_have_no_logprobs(self) -> Self:
        if self.echo and self.logprobs is not None:
            raise wrong_field("echo", "'echo' with 'logprobs' is not supported: prompts have no log-probabilities here")
        return self

    def sampling(self) -> SamplingParams:
        """Raises `RequestError` naming the first value that is out of range."""
        return self._sampling(logprobs=self.logprobs, max_tokens=self.max_tokens)
