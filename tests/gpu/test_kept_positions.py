"""The Triton kernels note the same kept positions as the torch ones, graphs included."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.bare_tokenizer import load_tokenizer
from tangram.kernels.interface import KernelChoice
from tangram.kernels.reference_kernels import ReferenceKernels
from tangram.kernels.triton import store
from tangram.kernels.triton.stored import LayerRows, StoredPool
from tangram.model.load import LoadedModel
from tangram.model.sealing import ChunkRanking
from tangram.types import SamplingParams
from tangram.watch import KeptPositions
from tests.core.cpu.test_kept_positions import Ends
from tests.gpu import test_engine as whole
from tests.interpreter import interpreter_few
from tests.small_engines import profile_file, run, small_engine, tiny_model

pytestmark = whole.pytestmark
# Each fills its third chunk by its answer.
PROMPTS = [[3 + (i * k) % 80 for i in range(44 + k)] for k in (1, 3)]


@pytest.fixture(scope="module")
def loaded(device: torch.device) -> LoadedModel:
    return tiny_model(whole.LLAMA, load_tokenizer("smollm2"), device)


@pytest.mark.parametrize("rest", [False, True])
def test_a_mask_tells_which_entries_are_chosen(rest: bool, device: torch.device) -> None:
    """Ties go to the lower position; the mask is part of a larger one."""
    chunks, heads, tokens, dim, page = 2, 3, 40, 16, 8
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 4, (chunks, heads, tokens), generator=generator).float().to(device)
    kept = torch.tensor([[8, 17, 40], [33, 8, 9]], dtype=torch.int32, device=device)
    k = torch.randn(chunks * tokens, heads, dim, generator=generator).to(device)
    pages = tokens // page
    tables = torch.arange(chunks * heads * pages, dtype=torch.int32, device=device)
    offsets = torch.arange(chunks * heads, dtype=torch.int32, device=device) * pages
    address = torch.zeros(chunks, heads, 3, dtype=torch.int32, device=device)
    address[..., 0] = offsets.view(chunks, heads)
    pool = torch.zeros(chunks * heads * pages, 1, 2, page, dim, device=device)
    whole_mask = torch.full((3, 2, heads, tokens), 7, dtype=torch.uint8, device=device)
    spans = torch.tensor([[0, 0, 0, 0, start] for start in (0, 512)], dtype=torch.int32)
    rows = LayerRows(0, tables, address, spans.to(device), tokens, tokens)
    store.seal(
        ChunkRanking(scores, 2, 3),
        *(k, k, StoredPool.of(pool), rows, kept),
        keeps_rest=rest,
        mask=whole_mask[1:, 1],
    )
    for chunk, start in enumerate((0, 512)):
        for head in range(heads):
            values = scores[chunk, head].tolist()
            forced = {*range(2 if start == 0 else 0), *range(tokens - 3, tokens)}
            order = sorted(range(tokens), key=lambda at: (at not in forced, -values[at], at))
            expected = torch.zeros(tokens, dtype=torch.uint8)
            expected[order[: kept[chunk, head]]] = 1
            assert torch.equal(whole_mask[1 + chunk, 1, head].cpu(), expected)
    untouched = torch.ones(3, 2, dtype=torch.bool)
    untouched[1:, 1] = False
    assert (whole_mask.cpu()[untouched] == 7).all()


def notes(
    loaded: LoadedModel, kernels: KernelChoice | None, tokens: int, **options: object
) -> list[KeptPositions]:
    engine = small_engine(
        loaded,
        kernels,
        records=True,
        chunk_tokens=whole.CHUNK,
        max_num_batched_tokens=48,
        **options,
    )
    ends = Ends(engine)
    run(engine, PROMPTS, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True))
    return [ends.find_kept(key) for key in sorted(ends.keys)]


@pytest.mark.parametrize("tokens", [5, pytest.param(8, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    ("scorer", "drafts"),
    interpreter_few(
        [("keydiff", False), ("keydiff", True), ("expected_attention", False)],
        ("keydiff", False),
        ("keydiff", True),
    ),
)
def test_engines_note_the_same_with_either_kernels(
    scorer: str, drafts: bool, tokens: int, loaded: LoadedModel, tmp_path: Path
) -> None:
    from tangram.kernels.triton.triton_kernels import TritonKernels

    profile = profile_file(loaded, tmp_path, scorer=scorer, chunk_tokens=whole.CHUNK)
    options: dict[str, object] = {"scorer": scorer, "profile": (profile,)}
    if drafts:
        form = {"method": "compressed_kv", "num_speculative_tokens": 2, "kv_retention": 0.5}
        options |= {"kv_retention": 1.0, "speculative_config": form}
    else:
        options["kv_retention"] = 0.5
    expected = notes(loaded, ReferenceKernels, tokens, **options)
    found = notes(loaded, TritonKernels, tokens, **options)
    assert len(found) == len(expected) == 6
    for one, other in zip(found, expected, strict=True):
        assert (one.chosen == other.chosen).all()
        assert 0 < one.chosen.mean() < 1
