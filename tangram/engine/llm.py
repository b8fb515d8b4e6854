"""`LLM`: the engine in the caller's process, with an interface like vLLM's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec

from rich.console import Console
from rich.progress import Progress

from tangram.config import EngineConfig
from tangram.engine.loop import Engine
from tangram.engine.setup.build import build_engine
from tangram.engine.text.answer_text import read_text
from tangram.engine.text.codec import TextCodec
from tangram.errors import ConfigError, RequestError, TangramError
from tangram.types import Event, FinishReason, Marks, Request, SamplingParams, TokenLogprob, Usage

Prompt = str | Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]
Options = ParamSpec("Options")


@dataclass(frozen=True)
class CompletionOutput:
    """One of the `n` answers to a prompt. `logprobs` is None unless requested."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: str


@dataclass(frozen=True)
class RequestOutput:
    """The result of one finished request.

    `kv_bytes` is the size of its pages at the end, over all its completions. `prompt_logprobs` are
    those of the prompt's tokens but the first; None unless requested.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    num_cached_tokens: int
    kv_bytes: int
    kv_bytes_uncompressed: int
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None


def _with_options_of(
    make: Callable[Options, EngineConfig],
) -> Callable[[Callable[[LLM, EngineConfig], None]], Callable[Concatenate[LLM, Options], None]]:
    """A decorator: `__init__` takes the arguments of `make` and gets the config it returns."""

    def decorate(
        init: Callable[[LLM, EngineConfig], None],
    ) -> Callable[Concatenate[LLM, Options], None]:
        def run(self: LLM, /, *args: Options.args, **options: Options.kwargs) -> None:
            init(self, make(*args, **options))

        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        rest = inspect.signature(make).parameters.values()
        run.__doc__ = init.__doc__
        run.__signature__ = inspect.Signature([first, *rest])  # type: ignore[attr-defined]
        return run

    return decorate


class LLM:
    """A model with a compressed KV cache, for offline use.

    The keywords are the fields of `EngineConfig`. `generate` and `chat` keep prefixes in the cache
    between calls.
    """

    @_with_options_of(EngineConfig)
    def __init__(self, config: EngineConfig) -> None:
        self.engine: Engine = build_engine(config)
        self._count = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        kv_retention: float | None = None,
        kv_scorer: str | None = None,
        speculative: bool | None = None,
        cache_salt: str = "",
    ) -> list[RequestOutput]:
        """Complete prompts together; results in the order of the prompts.

        A prompt is a text or `{"prompt_token_ids": [...]}`. `kv_scorer` chooses among profiles of
        one `kv_retention`; with `speculative` False nothing is drafted. Raises `RequestError`
        naming the field if a request is malformed or can never fit; then none of them runs.
        """
        listed = [prompts] if isinstance(prompts, (str, Mapping)) else list(prompts)
        tokens = [self._tokens(prompt) for prompt in listed]
        return self._complete(
            tokens,
            sampling_params,
            kv_retention=kv_retention,
            kv_scorer=kv_scorer,
            speculative=speculative,
            cache_salt=cache_salt,
        )

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        kv_retention: float | None = None,
        kv_scorer: str | None = None,
        speculative: bool | None = None,
        cache_salt: str = "",
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or several, by the model's chat template."""
        several = bool(messages) and not isinstance(messages[0], Mapping)
        tokens = [self.engine.codec.chat_prompt(m) for m in (messages if several else [messages])]  # type: ignore[arg-type]
        return self._complete(
            tokens,
            sampling_params,
            kv_retention=kv_retention,
            kv_scorer=kv_scorer,
            speculative=speculative,
            cache_salt=cache_salt,
        )

    def _tokens(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return self.engine.codec.encode(prompt)
        if not isinstance(prompt, Mapping) or set(prompt) != {"prompt_token_ids"}:
            got = sorted(prompt) if isinstance(prompt, Mapping) else f"a {type(prompt).__name__}"
            raise RequestError(
                f"a prompt is a text or {{'prompt_token_ids': [...]}}, this is {got}", "prompt"
            )
        return tuple(int(token) for token in prompt["prompt_token_ids"])

    def _complete(
        self,
        prompts: Sequence[tuple[int, ...]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        **fields: Any,
    ) -> list[RequestOutput]:
        params = _per_prompt(sampling_params, len(prompts))
        collectors = [
            _Collector(prompt, each.n) for prompt, each in zip(prompts, params, strict=True)
        ]
        requests = []
        for collector, each in zip(collectors, params, strict=True):
            self._count += 1
            number = str(self._count)
            thinks = each.thinking_token_budget is not None
            fields["marks"] = Marks(thinking=self.engine.codec.thinking_format if thinks else None)
            requests.append(Request(number, collector.prompt, each, collector.take, **fields))
        self.engine.submit(*requests)
        console = Console(stderr=True)
        with Progress(console=console, disable=not console.is_terminal) as progress:
            task = progress.add_task("Generating", total=len(collectors))
            while self.engine.busy:
                self.engine.step()
                progress.update(task, completed=sum(collector.done for collector in collectors))
        return [
            collector.output(request, self.engine.codec)
            for collector, request in zip(collectors, requests, strict=True)
        ]


def _per_prompt(
    params: SamplingParams | Sequence[SamplingParams] | None, prompts: int
) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * prompts
    if len(params) != prompts:
        raise ConfigError(
            f"sampling_params has {len(params)} entries for {prompts} prompts: give one, or one "
            "for each"
        )
    return params


class _Collector:
    """Gathers the events of one request."""

    def __init__(self, prompt: tuple[int, ...], samples: int) -> None:
        self.prompt = prompt
        self._events: list[list[Event]] = [[] for _ in range(samples)]

    def take(self, event: Event) -> None:
        self._events[event.index].append(event)

    @property
    def done(self) -> bool:
        return all(events and events[-1].finish_reason is not None for events in self._events)

    def output(self, request: Request, codec: TextCodec) -> RequestOutput:
        usages = [events[-1].usage for events in self._events]
        first: Usage = usages[0]
        return RequestOutput(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            outputs=tuple(
                self._completion(index, request, codec) for index in range(len(self._events))
            ),
            num_cached_tokens=first.cached_tokens,
            kv_bytes=sum(usage.kv_bytes for usage in usages),
            kv_bytes_uncompressed=sum(usage.kv_bytes_uncompressed for usage in usages),
            prompt_logprobs=None
            if request.sampling.prompt_logprobs is None
            else tuple(
                token
                for event in self._events[0]
                for part in event.prompt_logprobs
                for token, _ in part.read()
            ),
        )

    def _completion(self, index: int, request: Request, codec: TextCodec) -> CompletionOutput:
        events = self._events[index]
        reason = events[-1].finish_reason
        if reason is None or reason is FinishReason.ABORT:
            raise TangramError(
                f"request {request.request_id} was ended by the engine: {events[-1].error}"
            )
        wanted = request.sampling.logprobs is not None
        return CompletionOutput(
            index=index,
            text=read_text(codec, request.sampling, request.prompt_token_ids, events),
            token_ids=tuple(token for event in events for token in event.token_ids),
            logprobs=tuple(entry for event in events for entry in event.logprobs)
            if wanted
            else None,
            finish_reason=reason.value,
        )
