"""What an engine notes of kept positions is what it keeps: by the scores, and in the pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig

from tangram.compress.scorers import SCORERS, ChunkView
from tangram.config import EngineConfig
from tangram.engine.loop import Engine
from tangram.engine.setup.build import engine_of
from tangram.kernels.transfer import HostCopies
from tangram.model.load import LoadedModel
from tangram.types import Request, SamplingParams
from tangram.watch import ChunkPlace, KeptPositions, News, Readings, SequenceReading, SequenceState
from tests.core.cpu.test_offload import SLIDING
from tests.core.cpu.test_purity import ANSWER, TINY, C, LonePrompts
from tests.small_engines import drain, run, small_engine

Chunks = dict[tuple[int, int], tuple[ChunkView, Tensor]]
WORDS = LlamaConfig(**(TINY.to_dict() | {"vocab_size": 49152}))
HISTORIES = [tuple(3 + (i * i * k + i) % 9 for i in range(3 * C + 9 + k)) for k in range(1, 5)]
FORKS = [tuple(3 + (i * k) % 9 for i in range(60 + k)) for k in range(1, 6)]


class Ends:
    """Keeps the last reading of every sequence."""

    def __init__(self, engine: Engine) -> None:
        self.readings: list[SequenceReading] = []
        self.watched = engine.watch(self)

    def observe(self, news: News, readings: Readings) -> None:
        self.readings += [
            change.reading for change in news.changes if change.state is SequenceState.ENDED
        ]

    @property
    def keys(self) -> set[bytes]:
        return {key for reading in self.readings for key in reading.chunk_keys}

    def find_kept(self, key: bytes) -> KeptPositions:
        found = self.watched.find_kept(key)
        assert found is not None
        return found


def watch_sealing(engine: Engine) -> Chunks:
    """What sealing sees from now on: a chunk and its scores by (layer, first position)."""
    chunks: Chunks = {}

    def observe(chunk: ChunkView, scores: Tensor) -> None:
        chunks[chunk.layer, chunk.start] = chunk, scores.clone()

    passes = engine._runner.passes
    passes.sealing = replace(passes.sealing, observer=observe)
    return chunks


def best(scores: Tensor, start: int, engine: Engine, layer: int) -> list[set[int]]:
    """The positions that each head keeps, one head after the other, by sorting."""
    retention = engine.admission.retentions[0]
    size, found = scores.shape[1], []
    forced = {*range(retention.sink_tokens if start == 0 else 0)}
    forced |= {*range(size - retention.window_tokens, size)}
    for values, count in zip(
        scores.tolist(), retention.layout.head_kept_tokens[layer], strict=True
    ):
        order = sorted(range(size), key=lambda at: (at not in forced, -values[at], at))
        found.append(set(order[:count]))
    return found


def check_scores(engine: Engine, ends: Ends, chunks: Chunks) -> None:
    """Every chunk of the first sequence: its note, beside the scores that were observed."""
    reading, geometry = ends.readings[0], engine.geometry
    assert reading.sealed_chunks == len(reading.chunk_keys) > 0
    for number, key in enumerate(reading.chunk_keys):
        chosen = ends.find_kept(key).chosen
        for layer in range(geometry.layers):
            if geometry.windows[layer] is not None:
                assert chosen[layer].all(), "a window keeps all"
                continue
            start = number * reading.chunk_tokens
            expected = best(chunks[layer, start][1], start, engine, layer)
            assert [set(np.flatnonzero(head).tolist()) for head in chosen[layer]] == expected


def check_pool(engine: Engine, ends: Ends, chunks: Chunks) -> None:
    """The keys in the pool are those of the positions that were noted."""
    layout, reading = engine.layout, ends.readings[0]
    nodes = engine._scheduler.cache.prefix.nodes
    for number, key in enumerate(reading.chunk_keys):
        pages = nodes[key].pages
        for layer, head in np.ndindex(layout.head_group.shape):
            if layout.geometry.windows[layer] is not None:
                continue
            own = pages[layout.span_group[: len(pages)] == layout.head_group[layer, head]]
            stored = engine._runner.pool[own, layout.head_column[layer, head], 0]
            view = chunks[layer, number * reading.chunk_tokens][0]
            kept = torch.from_numpy(ends.find_kept(key).chosen[layer, head])
            assert torch.equal(stored.flatten(0, 1), view.keys[head][kept])


@pytest.mark.parametrize("scorer", ["fastkvzip", "keydiff"])
def test_notes_of_the_embedded_model_are_what_its_scores_select(
    scorer: str, loaded: LoadedModel
) -> None:
    config = EngineConfig(kv_retention=0.25, scorer=scorer, scope="model", kv_cache_gib=0.25)
    engine = engine_of(config, loaded, records=True)
    ends, chunks = Ends(engine), watch_sealing(engine)
    text = Path(__file__).parents[3].joinpath("docs/architecture.md").read_text()
    prompt = engine.codec.encode(text)[:1100]
    run(engine, [prompt], SamplingParams(max_tokens=2, temperature=0.0))
    assert ends.readings[0].sealed_chunks == 2
    check_scores(engine, ends, chunks)
    check_pool(engine, ends, chunks)


@pytest.mark.parametrize("scorer", [name for name in SCORERS if name != "fastkvzip"])
def test_notes_of_every_scorer_are_what_it_selects(
    scorer: str, adopt_tiny: Callable[[PretrainedConfig], LoadedModel], tmp_path: Path
) -> None:
    """KVzip stores in a second pass; an answer fills the second chunk."""
    size = 48  # SnapKV's window takes 32
    world = LonePrompts(adopt_tiny(WORDS if scorer == "kvzip" else TINY), tmp_path, scorer, size)
    engine = world.engine(records=True)
    ends, chunks = Ends(engine), watch_sealing(engine)
    run(engine, [tuple(3 + (i * i) % 9 for i in range(size + 15))], ANSWER)
    assert ends.readings[0].sealed_chunks == 2
    check_scores(engine, ends, chunks)
    check_pool(engine, ends, chunks)


def test_layers_with_windows_keep_all(
    adopt_tiny: Callable[[PretrainedConfig], LoadedModel], tmp_path: Path
) -> None:
    engine = LonePrompts(adopt_tiny(SLIDING), tmp_path, "keydiff").engine(records=True)
    ends, chunks = Ends(engine), watch_sealing(engine)
    run(engine, [HISTORIES[0]], ANSWER)
    check_scores(engine, ends, chunks)
    check_pool(engine, ends, chunks)


@pytest.fixture(scope="module")
def world(
    adopt_tiny: Callable[[PretrainedConfig], LoadedModel], tmp_path_factory: pytest.TempPathFactory
) -> LonePrompts:
    return LonePrompts(adopt_tiny(TINY), tmp_path_factory.mktemp("profiles"), "keydiff")


def alone(world: LonePrompts, prompts: Sequence[tuple[int, ...]]) -> dict[bytes, KeptPositions]:
    """The notes of prompts that each have a roomy engine of their own."""
    found = {}
    for prompt in prompts:
        engine = world.engine(records=True)
        ends = Ends(engine)
        run(engine, [prompt], ANSWER)
        found |= {key: ends.find_kept(key) for key in ends.keys}
    return found


def test_what_arrives_late_is_noted_before_the_engine_rests(
    world: LonePrompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of a GPU may be on their way when the last step ends."""
    monkeypatch.setattr(HostCopies, "arrived", False)
    assert len(alone(world, FORKS[:2])) > 2


def make_crowded_engine(world: LonePrompts, **options: object) -> Engine:
    """An engine that must preempt if it answers all of `FORKS` at once."""
    layout = world.engine().admission.retentions[0].layout
    pages = layout.most_pages(110) + layout.most_pages(100) // 2
    gib = pages * layout.page_bytes(4) / 2**30
    return world.engine(kv_cache_gib=gib, max_model_len=110, records=True, **options)


@pytest.mark.parametrize("offload_gib", [0.0, 0.01])
def test_notes_are_the_same_after_hits_preemption_and_host_memory(
    offload_gib: float, world: LonePrompts
) -> None:
    expected = alone(world, FORKS)
    engine = make_crowded_engine(world, kv_offload_gib=offload_gib)
    engine._runner.recorder.store.limit_bytes = 1 << 20
    ends = Ends(engine)
    for _ in range(2):
        run(engine, FORKS, ANSWER)
    stats = engine.stats()
    assert stats.preemptions and stats.cached_tokens
    assert bool(stats.restored_tokens) == bool(offload_gib)
    assert ends.keys == expected.keys()
    for key in ends.keys:
        assert (ends.find_kept(key).bits == expected[key].bits).all()
    places = {use.place for use in ends.watched.uses(sorted(ends.keys))}
    assert ChunkPlace.DEVICE in places
    assert places - {ChunkPlace.DEVICE} == {ChunkPlace.HOST if offload_gib else ChunkPlace.GONE}


def test_a_hit_finds_what_the_first_request_noted(world: LonePrompts) -> None:
    engine = world.engine(records=True)
    ends, history = Ends(engine), HISTORIES[0]
    first = run(engine, [history], ANSWER)[0]
    known = {key: ends.find_kept(key) for key in ends.keys}
    run(engine, [(*history, *first, 7, 8, 9)], ANSWER)
    one, two = ends.readings
    assert two.usage.cached_tokens >= one.sealed_chunks * C > 0
    assert two.chunk_keys[: one.sealed_chunks] == one.chunk_keys
    assert all(ends.find_kept(key) is known[key] for key in one.chunk_keys), (
        "nothing is noted twice"
    )


def test_without_prefix_caching_chunks_are_noted_too(world: LonePrompts) -> None:
    engine = world.engine(records=True, enable_prefix_caching=False)
    ends = Ends(engine)
    run(engine, HISTORIES[:1], ANSWER)
    assert len(ends.keys) == ends.readings[0].sealed_chunks > 0
    assert all(ends.find_kept(key) for key in ends.keys)


def test_what_drafts_read_is_noted_where_a_chunk_keeps_all(world: LonePrompts) -> None:
    drafts = {"method": "compressed_kv", "num_speculative_tokens": 2, "kv_retention": 0.5}
    engine = small_engine(
        world.loaded, records=True, speculative_config=drafts, profile=(world.profile,)
    )
    ends, chunks = Ends(engine), watch_sealing(engine)
    run(engine, HISTORIES[:1], ANSWER)
    draft = engine.admission.retentions[0].draft
    assert draft is not None
    for number, key in enumerate(ends.readings[0].chunk_keys):
        kept = ends.find_kept(key)
        assert (kept.chosen.sum(axis=2) == draft.layout.head_kept_tokens).all()
        for layer in range(engine.geometry.layers):
            scores = chunks[layer, number * C][1]
            for head, values in enumerate(scores):
                lowest = values[torch.from_numpy(kept.chosen[layer, head])][4:-2].min()
                assert (values[torch.from_numpy(~kept.chosen[layer, head])] <= lowest).all()


def test_lossless_chunks_need_no_note(world: LonePrompts) -> None:
    engine = small_engine(world.loaded, records=True)
    ends = Ends(engine)
    run(engine, HISTORIES[:1], ANSWER)
    assert ends.keys and not any(map(ends.watched.find_kept, ends.keys))


def test_notes_take_half_a_percent_of_the_pool_and_the_oldest_go_first(world: LonePrompts) -> None:
    engine = world.engine(kv_cache_gib=0.0004, max_model_len=110, records=True)
    store, pool = engine._runner.recorder.store, engine._runner.pool
    assert store.limit_bytes == int(0.005 * pool.numel() * pool.itemsize)
    ends = Ends(engine)
    for history in FORKS:
        run(engine, [history], ANSWER)
    newest = ends.readings[-1].chunk_keys
    assert 0 < store.used_bytes <= store.limit_bytes
    assert any(map(ends.watched.find_kept, newest))
    assert not all(map(ends.watched.find_kept, ends.keys)), "the bound was never met"


def test_unsound_state_takes_its_notes_along(world: LonePrompts) -> None:
    engine = world.engine(records=True)
    ends = Ends(engine)
    run(engine, HISTORIES[:1], ANSWER)
    assert all(map(ends.watched.find_kept, ends.keys))
    prompt, broken = HISTORIES[1], list[object]()
    embedding = world.loaded.model.get_input_embeddings()
    handle = embedding.register_forward_hook(lambda module, inputs, output: output * torch.nan)
    try:
        engine.submit(Request("bad", prompt, ANSWER, broken.append))
        drain(engine)
    finally:
        handle.remove()
    assert not any(map(ends.watched.find_kept, ends.keys))


def test_engines_that_nobody_watches_note_nothing(world: LonePrompts) -> None:
    engine = world.engine()
    run(engine, HISTORIES[:1], ANSWER)
    assert engine._runner.recorder is None and engine._scheduler.changes is None
