"""vLLM under the load of `tangram bench serving`: the same token ids, asked the same way, in its own process.

    python -m bench.serving.vllm_peer throughput --requests 64 --input-tokens 8192 --output-tokens 512 -o vllm.json
    python -m bench.serving.vllm_peer multi-turn --sessions 96 --history-tokens 16384 --turns 3
    python -m bench.serving.vllm_peer trace --file TRACE.jsonl --seconds 600 --speed 2

Random weights of a config.json (`--model`), bfloat16, prefix caching on, 0.9 of the GPU's memory. Needs vLLM; nothing
here is imported by Tangram.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tangram.drive.clock import Answer, Summary
from tangram.drive.work import Ask, alike, made_up, next_turn, traced
from tangram.tune.environment import environment

MODEL = Path(__file__).parents[1] / "models" / "qwen3-4b"


class Vllm:
    """vLLM's engine, stepped here."""

    def __init__(self, options: argparse.Namespace) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["HF_HUB_OFFLINE"] = "1"
        from vllm import LLM

        self._llm: Any = LLM(
            model=str(options.model), load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16",
            max_model_len=options.max_model_len, max_num_seqs=options.max_num_seqs, gpu_memory_utilization=0.9,
            enable_prefix_caching=True, disable_log_stats=True,
            **({"kv_cache_dtype": options.kv_cache_dtype} if options.kv_cache_dtype else {}),
        )  # fmt: skip
        self.vocab_size = int(json.loads((options.model / "config.json").read_text())["vocab_size"])
        self._count = 0

    def clear_cache(self) -> None:
        """Forget every prefix."""
        self._llm.reset_prefix_cache()

    def answered(self, asks: Sequence[Ask]) -> list[Answer]:
        """As `tangram.drive.clock.answered`."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        engine, begin = self._llm.llm_engine, time.perf_counter()
        answers = [Answer(ask.at_s, len(ask.tokens)) for ask in asks]
        by_id: dict[str, Answer] = {}
        waiting = sorted(range(len(asks)), key=lambda number: asks[number].at_s, reverse=True)
        while waiting or engine.has_unfinished_requests():
            now = time.perf_counter() - begin
            while waiting and asks[waiting[-1]].at_s <= now:
                number = waiting.pop()
                self._count += 1
                by_id[str(self._count)] = answers[number]
                engine.add_request(
                    str(self._count), {"prompt_token_ids": list(asks[number].tokens)},
                    SamplingParams(
                        temperature=0.0, max_tokens=asks[number].output_tokens, ignore_eos=True, detokenize=False,
                        output_kind=RequestOutputKind.DELTA,
                    ),
                )  # fmt: skip
            if not engine.has_unfinished_requests():
                time.sleep(max(0.0, asks[waiting[-1]].at_s - (time.perf_counter() - begin)))
                continue
            for output in engine.step():
                answer, tokens = by_id[output.request_id], output.outputs[0].token_ids
                answer.times_s += [time.perf_counter() - begin] * len(tokens)
                answer.token_ids += tokens
                answer.cached_tokens = output.num_cached_tokens or answer.cached_tokens
        return answers


def throughput(engine: Vllm, options: argparse.Namespace) -> dict[str, list[Answer]]:
    """See `tangram bench serving throughput`."""
    asks = alike(
        options.requests, options.input_tokens, options.output_tokens, shared_tokens=options.shared_tokens,
        vocab_size=engine.vocab_size,
    )  # fmt: skip
    parts = {}
    for number in range(options.repeats):
        engine.clear_cache()
        parts[f"run {number + 1}"] = engine.answered(asks)
    return parts


def multi_turn(engine: Vllm, options: argparse.Namespace) -> dict[str, list[Answer]]:
    """See `tangram bench serving multi-turn`."""
    histories = [made_up(options.history_tokens, engine.vocab_size, 4, number) for number in range(options.sessions)]
    parts = {}
    for turn in range(1, options.turns + 1):
        asks = next_turn(histories, turn, options.user_tokens, options.output_tokens, engine.vocab_size)
        parts[f"turn {turn}"] = answers = engine.answered(asks)
        histories = [ask.tokens + tuple(answer.token_ids) for ask, answer in zip(asks, answers, strict=True)]
    return parts


def trace(engine: Vllm, options: argparse.Namespace) -> dict[str, list[Answer]]:
    """See `tangram bench serving trace`."""
    parts = {}
    for speed in map(float, options.speed.split(",")):
        engine.clear_cache()
        asks = traced(options.file, seconds=options.seconds, speed=speed, vocab_size=engine.vocab_size)
        parts[f"speed {speed:g}"] = engine.answered(asks)
    return parts


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one load; print and keep its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    loads = parser.add_subparsers(required=True)
    numbers: dict[Any, dict[str, int]] = {
        throughput: {"requests": 64, "input-tokens": 1024, "output-tokens": 128, "shared-tokens": 0, "repeats": 1},
        multi_turn: {"sessions": 16, "history-tokens": 4096, "turns": 3, "user-tokens": 128, "output-tokens": 128},
        trace: {"seconds": 600},
    }
    for run, defaults in numbers.items():
        load = loads.add_parser(run.__name__.replace("_", "-"))
        load.set_defaults(run=run)
        for name, default in defaults.items():
            load.add_argument(f"--{name}", type=int, default=default)
        if run is trace:
            load.add_argument("--file", type=Path, required=True)
            load.add_argument("--speed", default="1")
        load.add_argument("--model", type=Path, default=MODEL)
        load.add_argument("--max-model-len", type=int, default=40960)
        load.add_argument("--max-num-seqs", type=int, default=256)
        load.add_argument("--kv-cache-dtype", default=None)
        load.add_argument("-o", "--output", type=Path, default=None)
    options = parser.parse_args(arguments)
    engine = Vllm(options)
    engine.answered(alike(2, 512, 4, shared_tokens=0, vocab_size=engine.vocab_size))  # compiled and captured
    engine.clear_cache()
    summaries = {name: Summary.of(answers) for name, answers in options.run(engine, options).items()}
    table = Table("vLLM", "seconds", "requests/s", "tokens/s", "from cache", "TTFT s, p50", "p90", "TPOT ms, p50")
    for name, one in summaries.items():
        figures = (one.seconds, one.requests_per_s, one.tokens_per_s, one.cached_share, one.ttft_s["p50"],
                   one.ttft_s["p90"], one.tpot_ms.get("p50", 0.0))  # fmt: skip
        table.add_row(name, *(f"{figure:,.2f}" for figure in figures))
    Console().print(table)
    if options.output is not None:
        given = {name: str(value) for name, value in vars(options).items() if name not in ("run", "output")}
        content = {
            "command": f"python -m bench.serving.vllm_peer {options.run.__name__.replace('_', '-')}",
            "options": given, "environment": environment(),
            "parts": {name: asdict(summary) for name, summary in summaries.items()},
        }  # fmt: skip
        options.output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
