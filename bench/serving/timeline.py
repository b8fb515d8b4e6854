"""What a step is made of, on one engine: `python -m bench.serving.compare ENGINE --timeline CASES`.

For each case there are times of steps without a profiler, and then the device's kernels from a
profiled run. A decode step's kernels are the difference of two runs that differ in the length of
their answers alone, so that prompts do not count. A turn is a prompt whose history is cached, a
prefill one of which nothing is.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from bench.serving.competitors import ServingEngine
from tangram_lab.load.asks import Ask, draw_tokens

# The first kind of which a word stands in a kernel's name. FlashAttention's kernels are CUTLASS's,
# and what writes entries for it is named after both.
KINDS = {
    "cache": (
        "cache",
        "seal_chunk",
        "append_entries",
        "store_rows",
        "gather_",
        "score_tokens",
        "sum_directions",
        "compare_keys",
    ),
    "attention": ("flash", "fmha", "att", "decode_tasks", "prefill_tiles", "merge_"),
    "products": (
        "gemm",
        "nvjet",
        "cutlass",
        "cublas",
        "splitk",
        "gemv",
        "xmma",
        "matmul",
        "fused_moe",
    ),
    "copies": ("memcpy", "memset"),
}
DECODE = {
    "decode-1x512": (1, 512),
    "decode-1x8k": (1, 8000),
    "decode-24x8k": (24, 8000),
    **{f"decode-{rows}x300": (rows, 300) for rows in (64, 128, 256, 512)},
}
TURNS = {"turn-8k": (8000, 128)}
PREFILLS = {"prefill-8k": 8192}
CASES = (*DECODE, *TURNS, *PREFILLS)
SHORT, LONG, TRIALS, PROMPTS = 32, 96, 20, 8

# Kernels of a run: name, from and to in us of the device's clock.
Kernels = list[tuple[str, float, float]]


def kind_of(name: str) -> str:
    """The kind of a kernel by its name; `other` are norms, rotations, gates and sampling."""
    low = name.lower()
    found = (kind for kind, words in KINDS.items() if any(word in low for word in words))
    return next(found, "other")


def record(run: Callable[[], object]) -> Kernels:
    """The kernels that run on the device meanwhile, in the order of their beginnings."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    found = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type.name == "CUDA"
    ]
    return sorted(found, key=lambda kernel: kernel[1])


def sum_busy_us(kernels: Kernels) -> float:
    """How long at least one kernel ran."""
    total, end = 0.0, float("-inf")
    for _, begin, until in kernels:
        total += max(0.0, until - max(begin, end))
        end = max(end, until)
    return total


def add_up(kernels: Kernels) -> dict[str, tuple[float, float]]:
    """For each name, how often it ran and its us."""
    found: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    for name, begin, until in kernels:
        count, us = found[name]
        found[name] = count + 1, us + until - begin
    return found


def describe(more: Kernels, less: Kernels, steps: int, wall_ms: Sequence[float]) -> dict[str, Any]:
    """Figures of one step: `more` are the kernels of `steps` more than `less`."""
    totals, fewer = add_up(more), add_up(less)
    names = {
        name: [
            (count - fewer.get(name, (0, 0))[0]) / steps,
            (us - fewer.get(name, (0, 0))[1]) / steps,
        ]
        for name, (count, us) in totals.items()
    }
    top = sorted(names.items(), key=lambda item: -item[1][1])[:30]
    return {
        "wall_ms": sorted(wall_ms),
        "busy_ms": (sum_busy_us(more) - sum_busy_us(less)) / steps / 1e3,
        "launches": sum(count for count, _ in names.values()),
        "kernels": [[name, count, us] for name, (count, us) in top],
    }


def split_busy(case: Mapping[str, Any]) -> dict[str, float]:
    """A case's busy ms by kinds, from its longest kernels.

    Attention is what the other kinds leave, since its kernels overlap.
    """
    found = dict.fromkeys((*KINDS, "other"), 0.0)
    for name, _, us in case["kernels"]:
        found[kind_of(name)] += us / 1e3
    found["attention"] = case["busy_ms"] - sum(found.values()) + found["attention"]
    return found


def measure_decode(engine: ServingEngine, prompts: Sequence[tuple[int, ...]]) -> dict[str, Any]:
    """A decode step of sequences that begin with `prompts`."""

    def answer(tokens: int) -> list[float]:
        answers = engine.answer_all([Ask(prompt, tokens) for prompt in prompts])
        return [1e3 * (late - soon) for soon, late in pairwise(answers[0].times_s[SHORT:])]

    engine.clear_cache()
    answer(LONG)
    walls = [wall for _ in range(5) for wall in answer(LONG)]
    less, more = record(lambda: answer(SHORT)), record(lambda: answer(LONG))
    return describe(more, less, LONG - SHORT, walls)


def draw_prompts(engine: ServingEngine, rows: int, context: int) -> list[tuple[int, ...]]:
    """`rows` prompts of `context` tokens that share nothing."""
    return [draw_tokens(context, engine.vocab_size, 11, number) for number in range(rows)]


def measure_turn(engine: ServingEngine, history: int, new: int) -> dict[str, Any]:
    """The first token of a prompt of `new` tokens behind a cached `history`, alone."""
    tokens = draw_tokens(history, engine.vocab_size, 12, 0)
    count = 0

    def answer() -> float:
        nonlocal count
        count += 1
        ask = Ask(tokens + draw_tokens(new, engine.vocab_size, 13, count), 1)
        return 1e3 * engine.answer_all([ask])[0].first_token_s

    engine.clear_cache()
    engine.answer_all([Ask(tokens, 1)])
    for _ in range(3):
        answer()
    walls = [answer() for _ in range(TRIALS)]
    return describe(record(lambda: [answer() for _ in range(TRIALS)]), [], TRIALS, walls)


def measure_prefill(engine: ServingEngine, length: int) -> dict[str, Any]:
    """A prompt of `length` tokens, of several that wait at once."""
    count = 0

    def answer() -> float:
        nonlocal count
        numbers = range(count, count + PROMPTS)
        count += PROMPTS
        asks = [Ask(draw_tokens(length, engine.vocab_size, 14, number), 1) for number in numbers]
        last = max(answer.first_token_s for answer in engine.answer_all(asks))
        return 1e3 * last / PROMPTS

    engine.clear_cache()
    answer()
    walls = [answer() for _ in range(3)]
    return describe(record(answer), [], PROMPTS, walls)


def measure_steps(
    engine: ServingEngine, name: str, chosen: Sequence[str], keep: Callable[[dict[str, Any]], None]
) -> None:
    """Look at the `chosen` of `CASES`; `keep` takes the results so far after each."""
    cases: dict[str, Any] = {}
    measures: dict[str, Callable[[], dict[str, Any]]] = {
        **{
            case: partial(measure_decode, engine, draw_prompts(engine, *sizes))
            for case, sizes in DECODE.items()
            if case in chosen
        },
        **{case: partial(measure_turn, engine, *sizes) for case, sizes in TURNS.items()},
        **{case: partial(measure_prefill, engine, length) for case, length in PREFILLS.items()},
    }
    for case in chosen:
        found = cases[case] = measures[case]()
        kinds = ", ".join(f"{kind} {ms:.2f}" for kind, ms in split_busy(found).items())
        print(
            f"{name} {case:14} {statistics.median(found['wall_ms']):6.2f} ms, device "
            f"{found['busy_ms']:6.2f} in {found['launches']:.0f} kernels ({kinds})",
            flush=True,
        )
        keep(cases)
