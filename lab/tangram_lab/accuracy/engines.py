"""One model for all methods: an engine for each method, and the questions asked of it."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import torch
from torch import Tensor

from tangram.calibrate.measure import Magnitudes, ScoreSource
from tangram.compress.provenance import ModelFingerprint
from tangram.compress.scorers import Scorer, make_scorer
from tangram.config import EngineConfig
from tangram.engine.loop import Engine
from tangram.engine.setup.build import engine_of
from tangram.engine.setup.observe import score_source
from tangram.engine.setup.profiles import scorer_spec
from tangram.engine.text.answer_text import read_text
from tangram.engine.text.codec import TextCodec
from tangram.errors import ConfigError, TangramError
from tangram.model.load import LoadedModel
from tangram.types import Event, FinishReason, Request, SamplingParams
from tangram_lab.accuracy.fidelity import compute_expected, fidelity
from tangram_lab.accuracy.method_profiles import Budgets
from tangram_lab.accuracy.methods import BY_INPUT, GATED, WITH_PROFILE, Method
from tangram_lab.accuracy.passages import Passages
from tangram_lab.accuracy.recall import (
    Contexts,
    Rule,
    competing,
    compute_kept_shares,
    everything,
    make_budget_rule,
    recall,
)
from tangram_lab.accuracy.results import Fidelity
from tangram_lab.accuracy.run import Ask, Read, Recalls, Reply, Watch
from tangram_lab.accuracy.sample_prompts import SamplePrompts, SuitePrompts
from tangram_lab.accuracy.work import count_prompt_work, count_reply_work
from tangram_lab.environment import environment


class Long(Protocol):
    """Prompts or passages."""

    @property
    def longest_tokens(self) -> int:
        """The longest sequence of these prompts."""
        ...


@dataclass(frozen=True)
class ModelBench:
    """A `Bench` of one loaded model. Its engines have the config `base`, changed by a method.

    Build it with `of`, which raises for impossible options before anything is measured. The full
    cache's logits of passages are computed once and kept in host memory (4 · V bytes a token
    measured).
    """

    base: EngineConfig
    loaded: LoadedModel
    budgets: Budgets
    references: dict[str, list[Tensor]] = field(default_factory=dict)
    contexts: Contexts = field(default_factory=Contexts)

    @classmethod
    def of(
        cls,
        base: EngineConfig,
        loaded: LoadedModel,
        methods: Sequence[Method],
        calibration_samples: int | None,
    ) -> ModelBench:
        """A bench for `methods`.

        Their profiles are calibrated on `calibration_samples` texts unless they are kept. None
        takes the profiles that a server would take. Raises `ConfigError` naming a scorer that does
        not fit the model or a chunk, or a ρ that cannot be met.
        """
        if calibration_samples is not None and calibration_samples < 1:
            raise ConfigError(
                f"calibration_samples is {calibration_samples}, it must be at least 1"
            )
        scorers = _scorers(base, methods, loaded.fingerprint)
        budgeted = [own for method in methods if (own := method.budgeted) is not None]
        source = partial(_source, loaded, scorers)
        budgets = Budgets(
            loaded.fingerprint,
            loaded.geometry,
            {name: scorer_spec(scorer) for name, scorer in scorers.items()},
            [method.kv_retention for method in budgeted if method.name == "static"],
            calibration_samples,
            loaded.kept_folder,
            source,
            loaded.encode,
            base.page_tokens,
            base.heads_per_page,
        )
        for method in methods:
            if method.scorer is not None and method.chunk_tokens is not None:
                scorers[method.scorer].check_tokens(method.chunk_tokens)
                scorers[method.scorer].check_model(loaded.fingerprint)
            if method.name not in BY_INPUT:
                method.config(base)
        for method in budgeted:
            budgets.equal(method)
        return cls(base, loaded, budgets)

    @property
    def codec(self) -> TextCodec:
        """The engines' tokenizer."""
        return TextCodec(self.loaded.tokenizer)

    def for_prompts(self, prompts: Sequence[Long]) -> ModelBench:
        """The same bench for sequences of up to this length.

        Raises `ConfigError` if the model was made for shorter ones.
        """
        longest, limit = (
            max(one.longest_tokens for one in prompts),
            self.loaded.geometry.max_positions,
        )
        if longest > limit:
            raise ConfigError(
                f"context_tokens is too large: the longest prompt has {longest} tokens with its "
                f"reply, the model was made for {limit}"
            )
        return replace(self, base=replace(self.base, max_model_len=longest))

    def calibrate(self, methods: Iterable[Method], watch: Watch) -> None:
        """Measure missing profiles of `methods` now, since engines may leave the model compiled."""
        for method in methods:
            budgeted = method.budgeted
            if budgeted is not None and budgeted.name == "static":
                watch.turns_to(f"how much each head keeps at ρ {budgeted.kv_retention:g}")
                self.budgets.profile(budgeted)

    def basis(self, method: Method) -> Mapping[str, Any]:
        """See `Bench`."""
        found: dict[str, Any] = {}
        if method.scorer is not None:
            found["scorer_parameters"] = dict(self.budgets.scorers[method.scorer].parameters)
        budgeted = method.budgeted
        if budgeted is not None and budgeted.name == "static":
            found |= self.budgets.basis(budgeted)
        return found

    def environment(self) -> Mapping[str, Any]:
        """See `Bench`."""
        return environment()

    @contextmanager
    def open(self, methods: Sequence[Method]) -> Iterator[Ask]:
        """See `Bench`."""
        engines = [self._engine(*methods)]  # the function must not keep the engine alive
        try:
            yield lambda method, samples, report: ask_questions(
                engines[0], samples, report, method.kv_retention
            )
        finally:
            engines.clear()
            self._clear()

    @contextmanager
    def reading(self, method: Method) -> Iterator[Read]:
        """See `Bench`."""

        def read(passages: Passages, report: Callable[[int], None]) -> tuple[Fidelity, ...]:
            def read_each(of: Method) -> Iterator[Tensor]:
                for logits in self._read_expected(of, passages):
                    if of == method:
                        report(passages.longest_tokens)
                    yield logits

            full = method if method.name == "full" else Method("full")
            if passages.sha256 not in self.references:
                self.references[passages.sha256] = list(read_each(full))
                self._clear()
            reference = self.references[passages.sha256]
            kept = reference if method is full else read_each(method)
            return tuple(
                fidelity(whole, logits, tokens)
                for tokens, whole, logits in zip(passages.pieces, reference, kept, strict=True)
            )

        yield read
        self._clear()

    def recall(self, method: Method, prompts: SuitePrompts) -> Recalls:
        """Contexts are scored once for consecutive methods with the same scorer and chunk size."""
        seen = self.contexts.score(method, prompts, self.budgets.source_of)
        self._clear()
        found, rule = list[tuple[float | None, ...]](), self._rule(method)
        places = self.contexts.evidence(prompts, self.codec)
        for sample, scores, questions in zip(prompts.samples, seen, places, strict=True):
            shares = compute_kept_shares(scores, rule, sample.shared_tokens)
            found.append(tuple(recall(shares, pieces) for pieces in questions))
        return tuple(found)

    def _rule(self, method: Method) -> Rule:
        if method.name in WITH_PROFILE:
            return make_budget_rule(self.budgets.profile(method), self.loaded.geometry)
        return everything if method.kv_retention == 1.0 else competing(method)

    def _read_expected(self, method: Method, passages: Passages) -> Iterator[Tensor]:
        """Logits on the host, by passage."""
        with self._config(method) as config:
            yield from (
                logits.cpu() for logits in compute_expected(config, self.loaded, passages.pieces)
            )

    def _clear(self) -> None:
        gc.collect()
        if self.loaded.device.type == "cuda":
            torch.cuda.empty_cache()

    def _engine(self, *methods: Method) -> Engine:
        with self._config(*methods) as config:
            return engine_of(config, self.loaded)

    @contextmanager
    def _config(self, *methods: Method) -> Iterator[EngineConfig]:
        """The config for `methods` that share an engine; their profiles are files while open."""
        with TemporaryDirectory() as folder:
            paths = list[str]()
            for own in (own for method in methods if (own := method.budgeted) is not None):
                paths.append(str(Path(folder) / f"{own.kv_retention:g}.json"))
                self.budgets.profile(own).save(Path(paths[-1]))
            # The engine computes its capacity at its own ρ: the largest of them.
            most = max(methods, key=lambda method: method.kv_retention)
            yield most.config(self.base, *paths)


def ask_questions(
    engine: Engine,
    samples: Sequence[SamplePrompts],
    report: Callable[[int], None],
    kv_retention: float,
) -> list[tuple[Reply, ...]]:
    """Greedy replies to all questions at ρ, by sample and question.

    `report` is called with the work that was done, in prompt tokens. The first question of a sample
    computes the context; the others wait for it. No more samples run at once than fit, so the cache
    still has the context then. Raises `RequestError` if a prompt can never fit, and `TangramError`
    if the engine gives one up.
    """
    longest = max(sample.longest_tokens for sample in samples)
    fit = engine.stats().pages_total // engine.layout.most_pages(longest)
    at_once = max(1, min(engine.config.max_num_seqs, fit))
    all_samples = [
        _RunningSample(engine, number, sample, kv_retention)
        for number, sample in enumerate(samples)
    ]
    waiting, running = deque(all_samples), list[_RunningSample]()
    while waiting or running:
        while waiting and len(running) < at_once:
            running.append(waiting.popleft())
            running[-1].ask()
        engine.step()
        report(sum(one.newly_done() for one in running))
        running = [one for one in running if not one.done]
    return [one.replies() for one in all_samples]


@dataclass(eq=False)
class _RunningSample:
    """The running questions about one context."""

    engine: Engine
    number: int
    sample: SamplePrompts
    kv_retention: float
    events: list[list[Event]] = field(default_factory=list)
    reported: int = 0

    def ask(self) -> None:
        """Submit all of them."""
        for index, prompt in enumerate(self.sample.prompts):
            self.events.append([])
            sampling = self._sampling(index)
            take, name = self.events[index].append, f"{self.number}/{index}"
            self.engine.submit(
                Request(name, prompt, sampling, take, kv_retention=self.kv_retention)
            )

    def _sampling(self, place: int) -> SamplingParams:
        question = self.sample.sample.questions[place]
        return SamplingParams.state_all(temperature=0.0, max_tokens=question.max_tokens)

    @property
    def done(self) -> bool:
        return self._answered == len(self.sample.prompts)

    @property
    def _answered(self) -> int:
        return sum(bool(own) and own[-1].finish_reason is not None for own in self.events)

    def newly_done(self) -> int:
        """The work done since the last call, in prompt tokens (work.py)."""
        before, self.reported = self.reported, sum(map(self._work, range(len(self.events))))
        return self.reported - before

    def _work(self, place: int) -> int:
        own, question = self.events[place], self.sample.sample.questions[place]
        if not own:
            return 0
        ended = own[-1].finish_reason is not None
        generated = None if ended else sum(len(event.token_ids) for event in own)
        return count_prompt_work(self.sample, place) + count_reply_work(question, generated)

    def replies(self) -> tuple[Reply, ...]:
        return tuple(map(self._reply, range(len(self.events))))

    def _reply(self, place: int) -> Reply:
        events, prompt = self.events[place], self.sample.prompts[place]
        last = events[-1]
        if last.finish_reason is FinishReason.ABORT:
            raise TangramError(f"request {last.request_id} was ended by the engine: {last.error}")
        text, usage = (
            read_text(self.engine.codec, self._sampling(place), prompt, events),
            last.usage,
        )
        return Reply(text, usage.completion_tokens, usage.kv_bytes, usage.kv_bytes_uncompressed)


def _scorers(
    base: EngineConfig, methods: Sequence[Method], model: ModelFingerprint
) -> dict[str, Scorer]:
    names = dict.fromkeys(method.scorer for method in methods if method.scorer is not None)
    if base.gate is not None and GATED not in names:
        raise ConfigError(
            f"gate is {base.gate!r}, but no method scores by {GATED}: leave it out or name that "
            "scorer"
        )
    gates = {GATED: Path(base.gate)} if base.gate is not None else {}
    return {name: make_scorer(name, gate=gates.get(name), model=model) for name in names}


def _source(
    loaded: LoadedModel,
    scorers: Mapping[str, Scorer],
    name: str,
    chunk_tokens: int,
    magnitudes: Magnitudes | None = None,
) -> ScoreSource:
    return score_source(loaded, scorers[name], chunk_tokens=chunk_tokens, magnitudes=magnitudes)
