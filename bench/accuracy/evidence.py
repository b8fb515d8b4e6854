"""Recall of evidence on LoCoMo, of every scorer: the kept share of the turns with the answers.

The model answers nothing. For each scorer one pass over the contexts, in chunks of 512 tokens,
serves the methods uniform, static and dynamic at every ρ. The prompts are those of `tangram eval
--suites locomo`. The file is rewritten after each scorer. The same command continues an interrupted
run, and skips what the file has.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.accuracy.evidence_file import METHODS, MethodRecall, RecallFile, ScorerRecall
from bench.accuracy.grid import EMBEDDED, SCORERS
from tangram.compress.scorers import default_scope
from tangram.config import EngineConfig
from tangram.errors import TangramError
from tangram.model.load import LoadedModel, load_model
from tangram_lab.accuracy.engines import ModelBench
from tangram_lab.accuracy.locomo import SUITE
from tangram_lab.accuracy.methods import Grid, Method
from tangram_lab.accuracy.results import Score, mean_recall
from tangram_lab.accuracy.sample_prompts import Alignment, Questions, SuitePrompts, filler_token
from tangram_lab.cli.evaluate import Bar


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--locomo", type=Path, required=True, help="LoCoMo's file or folder")
    parser.add_argument("--model", default=EMBEDDED)
    parser.add_argument(
        "--scorers", default=",".join(reversed(SCORERS)), help="comma-separated, in this order"
    )
    parser.add_argument("--retentions", default="0.5,0.3")
    parser.add_argument("--context-tokens", type=int, default=4096)
    parser.add_argument("--samples", type=int, help="contexts; all that the files give")
    parser.add_argument(
        "--gate", help="a gate file, for fastkvzip; one of the embedded model ships"
    )
    parser.add_argument("--calibration-samples", type=int, default=50)
    parser.add_argument("--device", default="auto")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    given = list(sys.argv[1:] if arguments is None else arguments)
    command = shlex.join(["python", "-m", "bench.accuracy.evidence", *given])
    try:
        measure(options, command)
    except TangramError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def measure(options: argparse.Namespace, command: str) -> RecallFile:
    """The figures of the file, and the scorers and ratios that it lacks."""
    scorers, retentions = (
        options.scorers.split(","),
        [float(word) for word in options.retentions.split(",")],
    )
    loaded = load_model(options.model, device=options.device)
    whole = bench_of(
        options,
        loaded,
        Grid(METHODS, scorers, retentions).methods(options.context_tokens, default_scope),
    )
    asked = Questions(SUITE, None, options.samples, options.context_tokens, path=options.locomo)
    prompts = asked.prompts(
        whole.codec, Alignment(EngineConfig.chunk_tokens, filler_token(whole.codec))
    )
    evidence = resume(options.output, describe_run(options, loaded, prompts), prompts)
    print(f"{evidence.questions} questions on {evidence.contexts} contexts", flush=True)
    for scorer in scorers:
        if missing := evidence.lacks(scorer, retentions):
            methods = Grid(METHODS, [scorer], missing).methods(
                options.context_tokens, default_scope
            )
            evidence.passes.append(
                measure_recall(
                    bench_of(options, loaded, methods), methods, prompts, scorer, command
                )
            )
            evidence.save(options.output)
    return evidence


def bench_of(
    options: argparse.Namespace, loaded: LoadedModel, methods: Sequence[Method]
) -> ModelBench:
    """Raises `ConfigError` for what cannot be measured."""
    gate = options.gate if any(method.scorer == "fastkvzip" for method in methods) else None
    base = EngineConfig(model=options.model, device=options.device, gate=gate)
    return ModelBench.of(base, loaded, methods, options.calibration_samples)


def measure_recall(
    bench: ModelBench, methods: Sequence[Method], prompts: SuitePrompts, scorer: str, command: str
) -> ScorerRecall:
    """Measure all `methods`, which share `scorer`, and print the time."""
    with Bar() as bar:
        bench.calibrate(methods, bar)
    begin, found = time.perf_counter(), list[MethodRecall]()
    for method in methods:
        by_sample = [mean_recall(own) for own in bench.recall(method, prompts)]
        score = Score.of([recall for recall in by_sample if recall is not None])
        found.append(
            MethodRecall(method=method.name, kv_retention=method.kv_retention, recall=score)
        )
    seconds = time.perf_counter() - begin
    shown = ", ".join(
        f"{one.method} {100 * one.recall.mean:.1f} % at ρ {one.kv_retention:g}" for one in found
    )
    print(f"{scorer}: {seconds:.0f} s; {shown}", flush=True)
    return ScorerRecall(
        scorer=scorer,
        command=command,
        environment=dict(bench.environment()),
        seconds=seconds,
        recalls=found,
    )


def describe_run(
    options: argparse.Namespace, loaded: LoadedModel, prompts: SuitePrompts
) -> dict[str, Any]:
    """The options that all figures of one file share."""
    return {
        "model": options.model,
        "weights_sha256": loaded.fingerprint.weights_sha256,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "context_tokens": options.context_tokens,
        "chunk_tokens": EngineConfig.chunk_tokens,
        "page_tokens": EngineConfig.page_tokens,
        "heads_per_page": EngineConfig.heads_per_page,
        "calibration_samples": options.calibration_samples,
        "prompts_sha256": prompts.sha256,
    }


def resume(path: Path, options: Mapping[str, Any], prompts: SuitePrompts) -> RecallFile:
    """The file, or an empty one.

    Raises `TangramError` if it was measured with other options, or has no folder.
    """
    if not path.parent.is_dir():
        raise TangramError(f"output is {path}, but there is no folder {path.parent}: make it first")
    if not path.exists():
        return RecallFile(
            options=dict(options), questions=prompts.count, contexts=len(prompts.samples)
        )
    found = RecallFile.load(path)
    if other := [name for name, value in options.items() if found.options.get(name) != value]:
        raise TangramError(
            f"output is {path}, which was measured with another {other[0]}, "
            f"{found.options.get(other[0])!r}: name another file, or move it away"
        )
    return found


if __name__ == "__main__":
    sys.exit(main())
