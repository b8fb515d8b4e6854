"""Decode with and without speculation under load: `python -m bench.speculation serving`.

Every case runs the same prompts through engines that differ in `speculative_config` alone, in
turns. Where the KV pools of two engines do not fit into the device side by side, an engine is
built, runs its repeats and goes before the next one. A case is written to speculation-CASE.json
after every run.

Random weights accept nothing real. In cases of a model's shape the model says the same token
everywhere, and a seeded random number decides whether a drafted token is that one. Drafts and
verifications do all of their work.
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import torch

from bench.serving.competitors import MODEL as SHAPE
from bench.speculation.cases import (
    CASES,
    METHODS,
    WARM_TOKENS,
    SpeculationCase,
    draw_prompts,
    shrink,
)
from bench.speculation.engines import (
    MeasuredEngine,
    build_measured,
    load_measured,
    pool_gib,
    with_speculation,
)
from bench.speculation.figures import PLAIN
from bench.speculation.options import make_parser, output_folder
from bench.speculation.report import CaseKeeper, describe_run, print_table
from bench.speculation.runs import Prompt, find_differences, measure_run
from bench.speculation.text_prompts import ask_about_texts, repeat_texts
from tangram.config import EngineConfig
from tangram.engine.text.codec import TextCodec
from tangram.link.collection import keep_uncollected
from tangram.model.load import LoadedModel
from tangram_lab.load.clock import TimedAnswer

_SMALL_SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "head_dim": 16,
    "vocab_size": 300,
}


class CaseRun:
    """Measures one case on one loaded model; `keep` takes all figures so far after every run."""

    def __init__(
        self,
        case: SpeculationCase,
        loaded: LoadedModel,
        keep: Callable[[Mapping[str, Any]], None],
        *,
        chunk_tokens: int = 512,
    ) -> None:
        self._case, self._loaded, self._keep = case, loaded, keep
        self._codec = TextCodec(loaded.tokenizer, eos_token_ids=loaded.eos_token_ids)
        self._config = make_config(case, loaded, chunk_tokens)
        self._answers: dict[int, list[TimedAnswer]] = {}  # of the plain engine
        self._asked: dict[int, list[Prompt]] = {}
        self.figures: dict[str, Any] = {
            name: {"speculative_config": METHODS[name], "warm_up": [], "runs": []}
            for name in case.methods
        }

    def measure(self, repeats: int, rounds: int) -> None:
        """`repeats` runs of every engine; where pools do not fit side by side, in each round."""
        if not self._case.apart:
            engines = {name: self._build(name) for name in self._case.methods}
            for name, measured in engines.items():
                self._warm(name, measured)
            for number in range(repeats):
                self._repeat(engines, number)
            return
        for turn in range(rounds):
            for name in self._case.methods:
                self._measure_alone(name, range(turn * repeats, (turn + 1) * repeats))

    def _repeat(self, engines: Mapping[str, MeasuredEngine], number: int) -> None:
        """One run of each, in an order of its own: a host is disturbed for seconds at a time."""
        order = Random(number).sample(list(engines), len(engines))
        answers = {name: self._run(name, engines[name], number) for name in order}
        for name, own in answers.items():
            self._compare(name, answers[PLAIN], own)

    def _measure_alone(self, name: str, numbers: range) -> None:
        measured = self._build(name)
        self._warm(name, measured)
        for number in numbers:
            answers = self._run(name, measured, number)
            self._compare(name, self._answers.setdefault(number, answers), answers)
        del measured
        _free()

    def _build(self, name: str) -> MeasuredEngine:
        config = with_speculation(self._config, METHODS[name])
        with keep_uncollected():  # as `tangram serve` does
            measured = build_measured(config, self._loaded, acceptance=self._case.acceptance)
        self.figures[name]["fits_tokens"] = measured.engine.stats().capacity_tokens
        return measured

    def _warm(self, name: str, measured: MeasuredEngine) -> None:
        """Compile what the first use compiles. Prompts that are asked again stay cached.

        Where they are not, answers are as long as measured ones, which seal chunks and try many
        numbers of drafts.
        """
        cached = self._case.cached
        prompts, tokens = self._prompts(0 if cached else -1), WARM_TOKENS
        if not cached:
            tokens = self._case.output_tokens
        found, _ = measure_run(measured, prompts, tokens, to_the_end=True)
        self.figures[name]["warm_up"].append(found)
        print(f"{name:14} warm-up     {describe_run(found)}", flush=True)

    def _run(self, name: str, measured: MeasuredEngine, number: int) -> list[TimedAnswer]:
        if not self._case.cached:
            measured.engine.clear_cache()
        prompts = self._prompts(0 if self._case.cached else number)
        found, answers = measure_run(measured, prompts, self._case.output_tokens, to_the_end=True)
        if self._case.places is not None:  # some are prefilled while others decode
            found["decode_tokens_per_s"] = found["tokens_per_s"]
        self.figures[name]["runs"].append(found)
        print(
            f"{name:14} run {len(self.figures[name]['runs']):3}     {describe_run(found)}",
            flush=True,
        )
        return answers

    def _compare(
        self, name: str, plain: Sequence[TimedAnswer], answers: Sequence[TimedAnswer]
    ) -> None:
        self.figures[name]["runs"][-1]["differences"] = find_differences(plain, answers)
        self._keep(self.figures)

    def _prompts(self, number: int) -> list[Prompt]:
        if number not in self._asked:
            self._asked[number] = self._make_prompts(number)
        return self._asked[number]

    def _make_prompts(self, number: int) -> list[Prompt]:
        case = self._case
        if case.of_shape():
            return draw_prompts(case, self._loaded.geometry.vocab_size)
        make = ask_about_texts if case.prompts == "texts" else repeat_texts
        return make(self._codec, case.count, case.context_tokens, number)


def make_config(case: SpeculationCase, loaded: LoadedModel, chunk_tokens: int) -> EngineConfig:
    """The options that all engines of a case have in common."""
    # A sequence's last chunk, and the answers of earlier runs, stay cached until they are in
    # the way.
    tokens = case.longest + 2 * chunk_tokens
    most = max(8192, chunk_tokens) + 256
    return EngineConfig(
        model=loaded.name,
        device=loaded.device.type,
        kv_retention=1.0,
        scorer="keydiff" if case.of_shape() else None,
        scope="model" if case.of_shape() else None,
        chunk_tokens=chunk_tokens,
        max_model_len=case.longest,
        max_num_seqs=case.running,
        max_num_batched_tokens=most if loaded.device.type == "cuda" else chunk_tokens + 256,
        kv_cache_gib=pool_gib(loaded, case.running, tokens),
    )


# -- the command -----------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> None:
    """Measure the cases, keep their files, print a table."""
    parser = _parser()
    options = parser.parse_args(arguments)
    names = options.cases.split(",")
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"cases has {unknown[0]}, there are {', '.join(CASES)}")
    command = shlex.join(["python", "-m", "bench.speculation", "serving", *arguments])
    cases = {name: shrink(CASES[name]) if options.small else CASES[name] for name in names}
    print_table(_measure_tangram(cases, command, options))


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("serving", __doc__)
    parser.add_argument("--cases", default=",".join(CASES), help="separated by commas; all")
    parser.add_argument("--repeats", type=int, default=3, help="measured runs of an engine")
    parser.add_argument(
        "--rounds", type=int, default=1, help="how often engines that fill the memory are built"
    )
    return parser


def _measure_tangram(
    cases: Mapping[str, SpeculationCase], command: str, options: argparse.Namespace
) -> dict[str, Mapping[str, Any]]:
    """The figures of each case; a model is loaded once for cases that follow each other."""
    found: dict[str, Mapping[str, Any]] = {}
    loaded, random = None, False
    for name, case in cases.items():
        print(f"# {name}: {case.title}", flush=True)
        if loaded is None or random != case.of_shape():
            loaded = None
            _free()
            random = case.of_shape()
            with _model(case, small=options.small) as source:
                loaded = load_measured(source, random=random)
        path = output_folder(options) / f"speculation-{name}.json"
        keep = CaseKeeper(path, case, command, str(loaded.dtype).removeprefix("torch."))
        chunk_tokens = 128 if options.small and random else 512
        run = CaseRun(case, loaded, keep, chunk_tokens=chunk_tokens)
        run.measure(options.repeats, options.rounds)
        found[name] = run.figures
        del run
        _free()
    return found


def _free() -> None:
    gc.unfreeze()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def _model(case: SpeculationCase, *, small: bool) -> Iterator[str]:
    """The name of the model, or a folder with the config of its shape."""
    if not case.of_shape():
        yield "smollm2"
    elif not small:
        yield str(SHAPE)
    else:
        with TemporaryDirectory() as folder:
            place = Path(folder) / "small-shape"
            place.mkdir()
            config = json.loads((SHAPE / "config.json").read_text()) | _SMALL_SHAPE
            (place / "config.json").write_text(json.dumps(config))
            yield str(place)
