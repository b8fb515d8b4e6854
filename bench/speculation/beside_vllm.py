"""vLLM without speculation under the loads of a shape: `python -m bench.speculation vllm`.

It runs where vLLM is installed, and needs nothing of the engine.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from bench.serving.competitors import MODEL, Vllm, choose_vllm_options
from bench.speculation.cases import CASES, WARM_TOKENS, SpeculationCase, draw_prompts, shrink
from bench.speculation.options import make_parser, output_folder
from bench.speculation.report import CaseKeeper, describe_run, print_table, summarise
from tangram_lab.load.asks import Ask

_SHAPES = [name for name, case in CASES.items() if case.of_shape()]


def main(arguments: Sequence[str]) -> None:
    """Measure the cases, keep their files, print a table."""
    parser = make_parser("vllm", __doc__)
    parser.add_argument("--cases", default=",".join(_SHAPES), help="separated by commas; all")
    parser.add_argument("--repeats", type=int, default=3, help="measured runs")
    options = parser.parse_args(arguments)
    names = options.cases.split(",")
    if unknown := [name for name in names if name not in _SHAPES]:
        parser.error(f"cases has {unknown[0]}, there are {', '.join(_SHAPES)}")
    command = shlex.join(["python", "-m", "bench.speculation", "vllm", *arguments])
    cases = {name: shrink(CASES[name]) if options.small else CASES[name] for name in names}
    print_table(measure(cases, command, options))


def measure(
    cases: Mapping[str, SpeculationCase], command: str, options: argparse.Namespace
) -> dict[str, Mapping[str, Any]]:
    """The figures of each case."""
    found: dict[str, Mapping[str, Any]] = {}
    longest = max(case.longest for case in cases.values())
    engine = Vllm(MODEL, **choose_vllm_options(longest))
    for name, case in cases.items():
        runs: list[dict[str, Any]] = []
        found[name] = {"vllm": {"options": engine.options, "runs": runs}}
        keep = CaseKeeper(
            output_folder(options) / f"speculation-{name}-vllm.json", case, command, "bfloat16"
        )
        prompts = draw_prompts(case, engine.vocab_size)
        engine.clear_cache()
        engine.answer_all([Ask(prompt, WARM_TOKENS) for prompt in prompts])
        for _ in range(options.repeats):
            answers = engine.answer_all([Ask(prompt, case.output_tokens) for prompt in prompts])
            runs.append(summarise(answers, {}))
            keep(found[name])
            print(f"vllm           {describe_run(runs[-1])}", flush=True)
    return found
