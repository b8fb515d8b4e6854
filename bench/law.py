"""What of the KV state and of answers stays the same, to the bit: `python -m bench.law`.

Prompts of several lengths are answered alone, one after the other. Then the same prompts are
answered in other ways: all at once, in another order, in smaller and larger steps, with a cached
prefix, without CUDA graphs, on another number of CPU threads. Each way is compared with the first:

- `answers`: how many have the same tokens;
- `chunks`: how many sealed chunks of the same tokens there are, of these how many keep the same
  positions, and how many hold the same bits;
- `apart`: the largest difference of an entry that both keep, as a part of the largest entry.

A form is `DTYPE`, `DTYPE/CACHE` or either with `@RATIO`: `bfloat16/fp8@0.5`. The figures go to
bench/results/law-cpu.json or law-gpu.json, and from there to docs/architecture.md (`python -m
bench.render architecture`).
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tangram.config import EngineConfig
from tangram.engine.setup.build import engine_of
from tangram.model.load import LoadedModel, load_model
from tangram.types import Event, Request, SamplingParams
from tangram.watch import News, Readings
from tangram_lab.accuracy.haystack import prose
from tangram_lab.environment import environment

RESULTS = Path(__file__).parent / "results"
FORMS = ("float32@0.5", "bfloat16@0.5", "bfloat16/fp8@0.5", "float16@0.5", "bfloat16@1.0")
# No step of up to 2,048 tokens has more than four of their chunks and ends.
CHARACTERS = (3600, 4440, 6600, 9000)
ENDING = " What does the text above say about pages?"
CHUNK_TOKENS = 512
MAX_SEQUENCES = 8

Prompts = Sequence[tuple[int, ...]]


@dataclass
class Found:
    """Answers by prompt; each sealed chunk's kept positions and entries by its key."""

    answers: list[list[int]]
    positions: dict[bytes, Any] = field(default_factory=dict)
    entries: dict[bytes, Tensor] = field(default_factory=dict)


class Nobody:
    """An observer: engines note kept positions only while somebody watches."""

    def observe(self, news: News, readings: Readings) -> None:
        """Nothing."""


class Measured:
    """An engine of one form, and what its prompts leave in an empty cache."""

    def __init__(self, loaded: LoadedModel, form: str, **options: Any) -> None:
        dtype, cache, ratio = parse_form(form)
        config = EngineConfig(
            **{
                "dtype": dtype,
                "device": loaded.device.type,
                "kv_cache_dtype": cache,
                "kv_retention": ratio,
                "kv_cache_gib": 1.0,
                "chunk_tokens": CHUNK_TOKENS,
                "max_num_seqs": MAX_SEQUENCES,
                "max_model_len": 4096,
                **options,
            }
        )
        self._engine = engine_of(config, loaded, records=True)
        self._watched = self._engine.watch(Nobody())

    def answer(self, prompts: Prompts, tokens: int, *, at_once: bool) -> list[list[int]]:
        """The greedy answers, of `tokens` tokens each."""
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        events: list[list[Event]] = [[] for _ in prompts]
        for number, (prompt, take) in enumerate(zip(prompts, events, strict=True)):
            self._engine.submit(Request(str(number), prompt, params, take.append))
            if not at_once:
                self._finish()
        self._finish()
        return [[token for event in own for token in event.token_ids] for own in events]

    def find(self, prompts: Prompts, tokens: int, *, at_once: bool, before: Prompts = ()) -> Found:
        """Answers and sealed chunks; `before` is answered first, and stays in the prefix cache."""
        self._engine.clear_cache()
        self.answer(before, 1, at_once=False)
        found = Found(self.answer(prompts, tokens, at_once=at_once))
        layout, pool = self._engine.admission.retentions[0].layout, self._engine._runner.pool
        sizes = torch.tensor([len(group) for group in layout.groups])
        members = sizes.repeat_interleave(torch.from_numpy(layout.sealed_pages).long())
        used = (torch.arange(layout.heads_per_page) < members[:, None]).to(pool.device)
        bits = pool.view(torch.uint8) if pool.element_size() == 1 else pool
        for node in self._engine._scheduler.cache.prefix.nodes.values():
            if node.transient:
                continue
            kept = self._watched.find_kept(node.key)
            found.positions[node.key] = None if kept is None else kept.chosen.copy()
            read = bits[torch.from_numpy(node.pages).long().to(pool.device)][used].cpu()
            found.entries[node.key] = read.view(pool.dtype)
        return found

    def _finish(self) -> None:
        while self._engine.step():
            pass


def parse_form(form: str) -> tuple[str, str, float]:
    """Dtype, dtype of the cache and retention ratio."""
    kinds, _, ratio = form.partition("@")
    dtype, _, cache = kinds.partition("/")
    return dtype, cache or "auto", float(ratio or 0.5)


def compare(found: Found, alone: Found) -> dict[str, Any]:
    """How many answers and chunks of `found` are those of `alone`."""
    shared = sorted(found.entries.keys() & alone.entries.keys())
    same = [key for key in shared if np.array_equal(found.positions[key], alone.positions[key])]
    pairs = [(found.entries[key].float(), alone.entries[key].float()) for key in same]
    return {
        "prompts": len(alone.answers),
        "answers": sum(map(list.__eq__, found.answers, alone.answers)),
        "chunks": len(shared),
        "same_positions": len(same),
        "same_bits": sum(torch.equal(found.entries[key], alone.entries[key]) for key in shared),
        "apart": max(
            (float((one - other).abs().max() / other.abs().max()) for one, other in pairs),
            default=0.0,
        ),
    }


def measure_form(
    load: Callable[[], LoadedModel], form: str, prompts: Prompts, tokens: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each way of computing the prompts, and its comparison with each prompt alone."""
    usual = Measured(load(), form)
    alone = usual.find(prompts, tokens, at_once=False)
    yield "alone again", compare(usual.find(prompts, tokens, at_once=False), alone)
    yield "together", compare(usual.find(prompts, tokens, at_once=True), alone)
    order = usual.find(prompts[::-1], tokens, at_once=True)
    order.answers.reverse()
    yield "together, reversed", compare(order, alone)
    begun = [prompt[: 3 * len(prompt) // 4] for prompt in prompts]
    hit = usual.find(prompts, tokens, at_once=False, before=begun)
    yield "behind a cached prefix", compare(hit, alone)
    del usual
    for name, at_once, options in other_engines(load().device):
        gc.collect()
        torch._dynamo.reset()  # past a number of graphs in a process, torch compiles none
        other = Measured(load(), form, **options)
        yield name, compare(other.find(prompts, tokens, at_once=at_once), alone)
        del other


def other_engines(device: torch.device) -> list[tuple[str, bool, Mapping[str, Any]]]:
    """Name, whether all prompts come at once, and options, of engines beside the usual one."""
    least = CHUNK_TOKENS + MAX_SEQUENCES
    steps: list[tuple[str, bool, Mapping[str, Any]]] = [
        ("together, a chunk a step", True, {"max_num_batched_tokens": least}),
        ("together, steps of 8,192 tokens", True, {"max_num_batched_tokens": 8192}),
    ]
    if device.type == "cpu":
        return [*steps, ("alone, another number of threads", False, {"threads": other_threads()})]
    return [*steps, ("alone, without graphs", False, {"enforce_eager": True})]


def other_threads() -> int:
    """A number of threads that torch does not take by itself: 2, or 1 where that is 2."""
    return 1 if torch.get_num_threads() == 2 else 2


def make_prompts(loaded: LoadedModel, characters: Sequence[int]) -> Prompts:
    """Prompts of so many characters each, of different generated texts."""
    prompts = []
    for number, size in enumerate(characters):
        pieces = prose(random.Random(number))
        text = " ".join(islice(pieces, size // 20))  # no sentence is shorter
        prompts.append(tuple(loaded.tokenizer.encode(text[:size] + ENDING)))
    return prompts


def spell(form: str, way: str, row: Mapping[str, Any]) -> str:
    """A line for the terminal."""
    chunks = f"{row['same_positions']}/{row['same_bits']} of {row['chunks']} chunks"
    return (
        f"{form:18} {way:34} answers {row['answers']} of {row['prompts']}; same positions/bits "
        f"{chunks}; apart {row['apart']:.1e}"
    )


def main() -> None:
    """Measure all forms, print a line for each way, keep the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default=None)
    parser.add_argument("--forms", nargs="+", default=FORMS)
    parser.add_argument("--characters", nargs="+", type=int, default=CHARACTERS)
    parser.add_argument("--tokens", type=int, default=48, help="of each answer")
    parser.add_argument("-o", "--output", type=Path, help="bench/results/law-{cpu,gpu}.json")
    options = parser.parse_args()
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    path = options.output or RESULTS / f"law-{'cpu' if device == 'cpu' else 'gpu'}.json"
    threads, rows, where = torch.get_num_threads(), list[dict[str, Any]](), environment()
    for form in options.forms:
        dtype = parse_form(form)[0]

        def load(dtype: str = dtype) -> LoadedModel:
            torch.set_num_threads(threads)
            return load_model("smollm2", dtype=dtype, device=device)

        prompts = make_prompts(load(), options.characters)
        for way, row in measure_form(load, form, prompts, options.tokens):
            rows.append({"form": form, "way": way, **row})
            print(spell(form, way, row), flush=True)
            content = {
                "command": " ".join(["python -m bench.law", *sys.argv[1:]]),
                "environment": where,
                "prompt_tokens": [len(prompt) for prompt in prompts],
                "answer_tokens": options.tokens,
                "rows": rows,
            }
            path.write_text(json.dumps(content, indent=1) + "\n")  # a later one may fail


if __name__ == "__main__":
    main()
