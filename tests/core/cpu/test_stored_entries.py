"""What a served chunk leaves in its pages is what its scores select, on the path that serves:
nothing observes, and chunks of a step are sealed together where their scorer can.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PretrainedConfig

from tangram.cache.keys import chunk_key, root_key
from tangram.engine.loop import Engine
from tangram.model.load import LoadedModel
from tangram.types import SamplingParams
from tests.core.cpu.test_gate import GATE, GATED
from tests.core.cpu.test_kept_positions import Chunks, best, watch_sealing
from tests.examples import examples
from tests.small_engines import profile_file, run, small_engine

C = 32
ONE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


class Scored:
    """A tiny model whose chunks are scored by `scorer`, and its profile."""

    def __init__(self, loaded: LoadedModel, folder: Path, scorer: str) -> None:
        self.loaded, gate = loaded, GATE if scorer == "fastkvzip" else None
        profile = profile_file(loaded, folder, scorer=scorer, gate=gate)
        self.options = {
            "kv_retention": 0.5,
            "scorer": scorer,
            "gate": None if gate is None else str(gate),
            "profile": (profile,),
            "max_num_seqs": 4,
        }

    def engine(self, **options: object) -> Engine:
        return small_engine(self.loaded, **(self.options | options))  # type: ignore[arg-type]

    def see(self, prompt: tuple[int, ...]) -> tuple[Engine, Chunks]:
        """Every chunk of a prompt and its scores, as an observer sees them."""
        engine = self.engine()
        chunks = watch_sealing(engine)
        run(engine, [prompt], ONE)
        return engine, chunks


@pytest.fixture(scope="module", params=["fastkvzip", "keydiff"])
def scored(
    request: pytest.FixtureRequest,
    adopt_tiny: Callable[[PretrainedConfig], LoadedModel],
    tmp_path_factory: pytest.TempPathFactory,
) -> Scored:
    return Scored(adopt_tiny(GATED), tmp_path_factory.mktemp("profiles"), request.param)


def check_stored(served: Engine, prompt: tuple[int, ...], seen: Engine, chunks: Chunks) -> None:
    """The pages of each chunk of `prompt` hold the keys and values that the best scores name."""
    retention = served.admission.retentions[0]
    layout, nodes = retention.layout, served._scheduler.cache.prefix.nodes
    key = root_key(retention.fingerprint, "")
    for start, end in pairwise(range(0, len(prompt) + 1, C)):
        key = chunk_key(key, np.array(prompt[start:end]))
        pages = nodes[key].pages
        for layer in range(layout.geometry.layers):
            view, scores = chunks[layer, start]
            for head, chosen in enumerate(best(scores, start, seen, layer)):
                own = pages[layout.span_group == layout.head_group[layer, head]]
                stored = served._runner.pool[own, layout.head_column[layer, head]]
                kept = sorted(chosen)
                for side, vectors in enumerate((view.keys, view.values)):
                    assert torch.equal(stored[:, side].flatten(0, 1), vectors[head][kept])


@settings(
    max_examples=examples(24),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,
)
@given(
    lengths=st.lists(st.integers(1, 4 * C), min_size=1, max_size=3),
    chunks_a_step=st.sampled_from([1, 2, 8]),
    seed=st.integers(2, 50),
)
def test_pages_hold_what_the_scores_of_their_chunks_select(
    scored: Scored, lengths: list[int], chunks_a_step: int, seed: int
) -> None:
    prompts = [
        tuple(3 + (i * i * seed + i * (7 + at)) % 89 for i in range(length))
        for at, length in enumerate(lengths)
    ]
    served = scored.engine(max_num_batched_tokens=chunks_a_step * C + 4)
    run(served, prompts, ONE)
    for prompt in prompts:
        check_stored(served, prompt, *scored.see(prompt))


def test_the_first_tokens_stay_however_low_they_score(scored: Scored) -> None:
    """Two prompts, the chunks of both in one step; in some heads sinks are not among the best."""
    prompts = [tuple(3 + (i * i * k) % 89 for i in range(2 * C)) for k in (5, 11)]
    served = scored.engine(max_num_batched_tokens=8 * C)
    run(served, prompts, ONE)
    forced = 0
    for prompt in prompts:
        seen, chunks = scored.see(prompt)
        check_stored(served, prompt, seen, chunks)
        retention = seen.admission.retentions[0]
        for (layer, start), (_, scores) in chunks.items():
            counts = retention.layout.head_kept_tokens[layer].tolist()
            for values, count in zip(scores, counts, strict=True):
                free = set(values.argsort(descending=True)[:count].tolist())
                forced += start == 0 and not free.issuperset(range(retention.sink_tokens))
    assert forced
