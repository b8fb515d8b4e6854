"""Chunks whose entries are all stored, best first, and engines that draft from the best."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.bare_tokenizer import load_tokenizer
from tangram.compress.select import order, protect
from tangram.kernels import reference
from tangram.model.load import LoadedModel
from tangram.model.sealing import ChunkRanking
from tests.gpu import test_engine as whole
from tests.gpu.test_prefill_and_store import SCORES, fp8_copy
from tests.interpreter import interpreter_few
from tests.small_engines import profile_file, tiny_model
from tests.speculation import METHODS, draft_always

HEADS, DIM, PAGE, SINKS, WINDOW = 3, 16, 8, 4, 3


@given(
    data=st.data(),
    tokens=st.sampled_from([16, 48, 130]),
    start=st.sampled_from([0, 512]),
    fp8=st.booleans(),
)
@settings(max_examples=20, deadline=None)
def test_sealing_stores_the_best_entries_first_and_the_others_behind_them(
    data: st.DataObject, tokens: int, start: int, fp8: bool
) -> None:
    """Ties, NaN, infinities and protected tokens included: each entry at its place, nothing else.

    An FP8 pool holds them divided by their scales.
    """
    from tangram.kernels.triton import store
    from tangram.kernels.triton.stored import LayerRows, StoredPool

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator().manual_seed(tokens + start)
    scores = torch.randn(2, HEADS, tokens, generator=generator)
    if data.draw(st.booleans()):
        drawn = data.draw(st.lists(SCORES, min_size=HEADS * tokens, max_size=HEADS * tokens))
        scores[data.draw(st.integers(0, 1))] = torch.tensor(drawn).view(HEADS, tokens)
    counts = st.lists(st.integers(8, tokens), min_size=HEADS, max_size=HEADS)
    first = [data.draw(counts) for _ in range(2)]
    # Powers of two, and entries that E4M3 holds exactly: the interpreter rounds differently.
    scales = 2.0 ** -torch.arange(2.0, 2.0 + HEADS * 2).view(1, HEADS, 2)
    k, v = (
        fp8_copy(torch.randn(2 * tokens, HEADS, DIM, generator=generator), own).float() * own
        for own in (scales[0, :, part, None] for part in range(2))
    )
    pages = 2 + -(-(tokens + 5) // PAGE)
    tables = torch.randperm(2 * HEADS * pages, generator=generator).int()
    address = torch.tensor(
        [[head * pages, head % 2, 5 * head % 7] for head in range(2 * HEADS)], dtype=torch.int32
    ).view(2, HEADS, 3)
    expected = torch.full((2 * HEADS * pages, 2, 2, PAGE, DIM), torch.nan)
    starts = [start, 512]
    for chunk in range(2):
        forced = protect(scores[chunk], starts[chunk], SINKS, WINDOW)
        places = order(forced, first[chunk], [tokens] * HEADS)
        own = [x[chunk * tokens : (chunk + 1) * tokens] for x in (k, v)]
        if fp8:
            own = [x / scales[0, :, part, None] for part, x in enumerate(own)]
        stored = ([x[at, head] for head, at in enumerate(places)] for x in own)
        reference.store(*stored, expected, tables, *address[chunk].numpy().T)
    dtype = torch.float8_e4m3fn if fp8 else torch.float32
    pool = torch.full(expected.shape, torch.nan).to(dtype).to(device)
    spans = torch.tensor([[0, 0, 0, 0, start] for start in starts], dtype=torch.int32)
    rows = LayerRows(0, *(x.to(device) for x in (tables, address, spans)), tokens, tokens)
    stored = StoredPool.of(pool, scales.to(device) if fp8 else None)
    store.seal(
        ChunkRanking(scores.to(device), SINKS, WINDOW),
        *(k.to(device), v.to(device), stored, rows),
        torch.tensor(first, dtype=torch.int32, device=device),
        keeps_rest=True,
    )
    torch.testing.assert_close(pool.float().cpu(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.fixture(scope="module")
def loaded(device: torch.device) -> LoadedModel:
    return tiny_model(whole.LLAMA, load_tokenizer("smollm2"), device)


@pytest.mark.parametrize(
    ("method", "scorer"),
    interpreter_few(
        [
            ("compressed_kv", "keydiff"),
            ("compressed_kv", "expected_attention"),
            ("suffix", "keydiff"),
        ],
        ("compressed_kv", "keydiff"),
    ),
)
def test_every_drafted_step_leaves_what_torch_leaves(
    method: str, scorer: str, loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sequences at once, of which one fills a chunk by what was drafted."""
    options: dict[str, Any] = {
        "kv_retention": 1.0,
        "scorer": scorer,
        "chunk_tokens": whole.CHUNK,
        "max_num_seqs": 3,
        "kv_cache_gib": 1e-3,
        "max_model_len": 100,
        "max_num_batched_tokens": 50,
        "speculative_config": METHODS[method] | {"num_speculative_tokens": 2},
        "profile": (profile_file(loaded, tmp_path, scorer=scorer, chunk_tokens=whole.CHUNK),),
    }
    answer = replace(whole.ANSWER, max_tokens=7)
    monkeypatch.setattr(whole, "ANSWER", answer)
    engines = [draft_always(engine) for engine in whole.both(loaded, options)]
    whole.in_step(engines, whole.PROMPTS[1:])
    ours, theirs = (engine._speculation for engine in engines)
    assert ours is not None and theirs is not None
    assert ours.counters == theirs.counters and ours.counters.drafted > 0
    assert engines[0].stats().sealed_chunks == 4
