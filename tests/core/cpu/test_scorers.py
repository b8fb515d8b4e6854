"""The scorers against kvpress 0.5.5 (see tests/fixtures/kvpress/make_fixture.py) and against their
own definitions.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tangram.compress.scorers import SCORERS, ChunkView, Reconstruction, Scorer, make_scorer
from tangram.compress.scorers.expected_attention import ExpectedAttention
from tangram.compress.scorers.fastkvzip import FastKVzip
from tangram.compress.scorers.keydiff import KeyDiff
from tangram.compress.scorers.kvzip import KVzip
from tangram.compress.scorers.rotation import rotate, unrotate
from tangram.compress.scorers.snapkv import SnapKV
from tangram.compress.scorers.streaming_llm import StreamingLLM
from tangram.compress.scorers.tova import TOVA
from tangram.compress.select import keep, protect
from tangram.errors import ConfigError, IntegrityError
from tests.mentions import mentioning

ROOT = Path(__file__).parents[3]
FIXTURES = ROOT / "tests" / "fixtures" / "kvpress"
GATE = FIXTURES / "gate.safetensors"
CHUNK = 96

Rotary = Callable[[Tensor], tuple[Tensor, Tensor]]


@pytest.fixture(scope="module")
def oracle() -> dict[str, Tensor]:
    return load_file(FIXTURES / "scores.safetensors")


def rotary(inv_freq: Tensor, factor: float) -> Rotary:
    def embed(positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions.unsqueeze(1).float() * inv_freq
        angles = torch.cat([angles, angles], dim=1)
        return angles.cos() * factor, angles.sin() * factor

    return embed


def view(oracle: dict[str, Tensor], model: str, layer: int, chunk: int) -> ChunkView:
    """One recorded chunk as the engine would hand it over."""
    embed = rotary(oracle[f"{model}/inv_freq"], float(oracle[f"{model}/rope_factor"]))
    at = f"{model}/{layer}/{chunk}"
    keys = oracle[f"{at}/keys"]
    repeat = None
    if f"{at}/repeat_keys" in oracle:
        repeat = Reconstruction(oracle[f"{at}/repeat_queries"], oracle[f"{at}/repeat_keys"])
    return ChunkView(
        queries=oracle[f"{at}/queries"],
        keys=keys,
        values=oracle[f"{at}/values"],
        start=chunk * CHUNK,
        layer=layer,
        scaling=keys.shape[-1] ** -0.5,
        rotary=embed,
        hidden=oracle.get(f"{at}/hidden"),
        reconstruction=repeat,
        sink_keys=oracle[f"{model}/{layer}/0/keys"][:, :4] if chunk else None,
    )


def random_view(
    *,
    tokens: int = 48,
    start: int = 0,
    kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 8,
    repeat: int = 70,
) -> ChunkView:
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return ChunkView(
        queries=normal(kv_heads * group, tokens, head_dim),
        keys=normal(kv_heads, tokens, head_dim),
        values=normal(kv_heads, tokens, head_dim),
        start=start,
        layer=0,
        scaling=head_dim**-0.5,
        rotary=rotary(1e4 ** -torch.linspace(0, 0.9, head_dim // 2), 1.0),
        hidden=normal(tokens, 16),
        reconstruction=Reconstruction(
            normal(kv_heads * group, repeat, head_dim), normal(kv_heads, repeat, head_dim)
        ),
        sink_keys=normal(kv_heads, 4, head_dim) if start else None,
    )


SAME_AS_KVPRESS: list[tuple[str, Scorer]] = [
    ("tova", TOVA()),
    ("keydiff", KeyDiff()),
    ("snapkv_max", SnapKV()),
    ("snapkv_mean", SnapKV(window_tokens=24, kernel_tokens=5, max_pooling=False)),
    ("expected_attention", ExpectedAttention()),
    ("expected_attention_zero", ExpectedAttention(epsilon=0.0, future_tokens=64)),
    ("kvzip", KVzip()),
    ("fastkvzip", FastKVzip(GATE)),
]


@pytest.mark.parametrize("chunk", [0, 1])
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize(
    ("press", "scorer"), SAME_AS_KVPRESS, ids=[press for press, _ in SAME_AS_KVPRESS]
)
def test_scores_are_those_of_kvpress(
    oracle: dict[str, Tensor], press: str, scorer: Scorer, layer: int, chunk: int
) -> None:
    scores = scorer.score(view(oracle, "plain", layer, chunk))
    torch.testing.assert_close(
        scores, oracle[f"plain/{layer}/{chunk}/scores/{press}"], rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("chunk", [0, 1])
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("press", ["expected_attention", "expected_attention_zero"])
def test_expected_attention_undoes_a_scaled_rotation(
    oracle: dict[str, Tensor], press: str, layer: int, chunk: int
) -> None:
    assert oracle["yarn/rope_factor"] > 1.1
    scores = dict(SAME_AS_KVPRESS)[press].score(view(oracle, "yarn", layer, chunk))
    torch.testing.assert_close(
        scores, oracle[f"yarn/{layer}/{chunk}/scores/{press}"], rtol=1e-4, atol=1e-6
    )


def test_streaming_llm_keeps_what_kvpress_keeps(oracle: dict[str, Tensor]) -> None:
    chunk = view(oracle, "plain", 0, 0)
    expected = [row.nonzero().squeeze(1) for row in oracle["plain/0/0/scores/streaming_llm"]]
    kept = keep(
        protect(StreamingLLM().score(chunk), 0, sinks=4, window=0), [len(row) for row in expected]
    )
    assert [row.tolist() for row in kept] == [row.tolist() for row in expected]


def test_streaming_llm_keeps_the_newest_tokens_of_a_later_chunk() -> None:
    scores = StreamingLLM().score(random_view(start=48))
    assert [row.tolist() for row in keep(protect(scores, 48, sinks=4, window=0), [3, 2])] == [
        [45, 46, 47],
        [46, 47],
    ]


def test_repeat_pass_has_the_tokens_of_kvpress(oracle: dict[str, Tensor]) -> None:
    tokens = oracle["tokens"].tolist()
    first, second = tokens[:CHUNK], tokens[CHUNK:]

    def encode(text: str) -> list[int]:
        return list(text.encode())

    repeat = KVzip().repeat_tokens
    assert repeat(encode, first, suffix=[10, 7]) == oracle["repeat_tokens/0"].tolist()
    assert repeat(encode, second, first, suffix=[10, 7]) == oracle["repeat_tokens/1"].tolist()


def test_expected_attention_turns_only_the_rotary_dimensions() -> None:
    """Partial RoPE, which kvpress does not know: the definition, written out with matrices in
    float64.
    """
    start, tokens, dim, rotary_dim, factor = 64, 64, 8, 4, 1.3
    inv_freq = torch.tensor([1.0, 0.05], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    before = torch.randn(2, tokens, dim, generator=generator, dtype=torch.float64) + 0.5
    keys, values = torch.randn(2, 1, tokens, dim, generator=generator, dtype=torch.float64)

    def matrix(position: int) -> Tensor:
        turn = torch.eye(dim, dtype=torch.float64)
        for i, frequency in enumerate(inv_freq.tolist()):
            angle = torch.tensor(position * frequency, dtype=torch.float64)
            j = i + rotary_dim // 2
            turn[i, i] = turn[j, j] = factor * angle.cos()
            turn[i, j], turn[j, i] = -factor * angle.sin(), factor * angle.sin()
        return turn

    after = torch.stack([before[:, t] @ matrix(start + t).T for t in range(tokens)], dim=1)
    future = torch.stack([matrix(start + tokens + t) for t in range(512)]).mean(dim=0)
    expected = torch.zeros(tokens, dtype=torch.float64)
    for head in before:
        mean, covariance = (
            future @ head.mean(dim=0),
            future @ torch.cov(head.T, correction=0) @ future.T,
        )
        logits = [0.3 * k @ mean + 0.5 * 0.3**2 * k @ covariance @ k for k in keys[0]]
        expected += torch.stack(logits).softmax(dim=0) / 2
    expected = (expected + 0.01) * values[0].norm(dim=1)

    chunk = ChunkView(
        queries=after.float(),
        keys=keys.float(),
        values=values.float(),
        start=start,
        layer=0,
        scaling=0.3,
        rotary=rotary(inv_freq.float(), factor),
    )
    torch.testing.assert_close(
        ExpectedAttention().score(chunk)[0], expected.float(), rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("rotary_dim", [16, 8])
@pytest.mark.parametrize("factor", [1.0, 1.2])
def test_unrotate_is_the_inverse_of_rotate(rotary_dim: int, factor: float) -> None:
    cos, sin = rotary(1e4 ** -torch.linspace(0, 0.9, rotary_dim // 2), factor)(
        torch.arange(1000, 1050)
    )
    x = torch.randn(3, 50, 16, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(unrotate(rotate(x, cos, sin), cos, sin), x, rtol=1e-5, atol=1e-6)


class LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the largest tensor any operation makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.elements = max(self.elements, result.numel())
        return result


def test_kvzip_memory_does_not_grow_with_the_repeat_queries() -> None:
    chunk = random_view(tokens=64, repeat=640)
    with LargestTensor() as largest:
        KVzip().score(chunk)
    queries, keys = chunk.queries.shape[0], 64 + 640
    assert largest.elements <= queries * 64 * keys < queries * 640 * keys / 9


def test_kvzip_reads_the_sinks_only_behind_the_first_chunk() -> None:
    later = random_view(start=48)
    moved = dataclasses.replace(later, start=0)
    assert (KVzip().score(later) < KVzip().score(moved)).any()
    torch.testing.assert_close(KVzip(sinks=0).score(later), KVzip().score(moved))


def test_tova_ranks_alike_for_all_heads() -> None:
    scores = TOVA().score(random_view())
    assert torch.equal(scores[0], scores[1])


def every_scorer() -> list[Scorer]:
    return [make_scorer(name, gate=GATE if name == "fastkvzip" else None) for name in SCORERS]


@pytest.mark.parametrize("scorer", every_scorer(), ids=lambda scorer: scorer.name)
@pytest.mark.parametrize("chunk_index", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_scorer_keeps_the_contract(
    oracle: dict[str, Tensor], scorer: Scorer, chunk_index: int, dtype: torch.dtype
) -> None:
    chunk = cast(view(oracle, "plain", 1, chunk_index), dtype)
    before = cast(chunk, dtype)
    scores = scorer.score(chunk)
    assert scores.shape == (2, CHUNK)
    assert scores.dtype == torch.float32
    assert scores.isfinite().all()
    assert torch.equal(scores, scorer.score(chunk))
    unread = CHUNK - min(CHUNK, scorer.count_queries(CHUNK))
    few = dataclasses.replace(chunk, queries=chunk.queries[:, unread:])
    assert torch.equal(scores, scorer.score(few))
    for name in ("queries", "keys", "values", "hidden"):
        assert torch.equal(getattr(chunk, name), getattr(before, name)), (
            f"{scorer.name} changed the chunk's {name}"
        )


def cast(chunk: ChunkView, dtype: torch.dtype) -> ChunkView:
    """A copy of a chunk in another dtype."""
    repeat = chunk.reconstruction
    return dataclasses.replace(
        chunk,
        queries=chunk.queries.clone().to(dtype),
        keys=chunk.keys.clone().to(dtype),
        values=chunk.values.clone().to(dtype),
        hidden=None if chunk.hidden is None else chunk.hidden.clone().to(dtype),
        reconstruction=repeat and Reconstruction(repeat.queries.to(dtype), repeat.keys.to(dtype)),
        sink_keys=None if chunk.sink_keys is None else chunk.sink_keys.to(dtype),
    )


@pytest.mark.parametrize(
    ("scorer", "tokens"), [(SnapKV(), 32), (ExpectedAttention(), 4), (TOVA(), 1)]
)
def test_a_chunk_that_is_too_short_is_a_configuration_error(scorer: Scorer, tokens: int) -> None:
    with pytest.raises(
        ConfigError, match=mentioning(f"chunk_tokens {tokens} {scorer.name} {tokens + 1}")
    ):
        scorer.score(random_view(tokens=tokens))
    assert scorer.score(random_view(tokens=tokens + 1)).shape == (2, tokens + 1)


@pytest.mark.parametrize(
    ("scorer", "missing"),
    [(FastKVzip(GATE), "hidden"), (KVzip(), "reconstruction"), (KVzip(), "sink_keys")],
)
def test_what_the_engine_forgot_is_named(
    oracle: dict[str, Tensor], scorer: Scorer, missing: str
) -> None:
    chunk = dataclasses.replace(view(oracle, "plain", 0, 1), **{missing: None})  # type: ignore[arg-type]
    with pytest.raises(IntegrityError, match=f"without {missing}"):
        scorer.score(chunk)


@pytest.mark.parametrize("chunk", [0, 1])
def test_the_example_of_the_documentation_is_lagkv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, oracle: dict[str, Tensor], chunk: int
) -> None:
    blocks = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "scorers.md").read_text(), flags=re.DOTALL
    )
    (example,) = [block for block in blocks if "class LagKV" in block]
    assert example.count("\n") < 40
    (tmp_path / "documented_scorer.py").write_text(example)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "documented_scorer", raising=False)
    with mock.patch.dict(SCORERS):
        lagkv = importlib.import_module("documented_scorer").LagKV
        assert isinstance(make_scorer("lagkv"), lagkv)
    scorer = lagkv(lag_tokens=16)
    assert scorer.parameters() == {"lag_tokens": 16}
    scores = scorer.score(view(oracle, "plain", 0, chunk))
    torch.testing.assert_close(
        scores, oracle[f"plain/0/{chunk}/scores/lagkv"], rtol=1e-4, atol=1e-6
    )


def test_the_documentation_lists_every_scorer() -> None:
    table = (ROOT / "docs" / "scorers.md").read_text().split("##")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE) == list(SCORERS)
