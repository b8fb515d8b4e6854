"""What FP8 products would cost: each rounding adds its error, and the program keeps them all."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import fp8_products
from bench.fp8_products import REFERENCE, VARIANTS, attend_last, measure, round_queries
from bench.logbook import LOGBOOK
from tangram.model.load import LoadedModel

LAST = 24


@pytest.fixture(scope="module")
def found(loaded: LoadedModel) -> dict[str, Any]:
    text = LOGBOOK.read_text(encoding="utf-8")
    return measure(loaded, loaded.tokenizer.encode(text)[:200], LAST)


def test_each_rounding_adds_to_the_error(found: dict[str, Any]) -> None:
    errors = {name: one["error"]["median"] for name, one in found.items()}
    assert 0 < errors["bfloat16"] < 0.02 < errors["fp8"]
    assert errors["fp8"] < errors["fp8_queries"] < errors["fp8_all"] < 0.3
    assert errors["fp8_all_wide"] < errors["fp8_all"]
    assert 0 < found["bfloat16"]["kl_nats"] < found["fp8"]["kl_nats"]


def test_figures_are_those_of_all_layers_and_heads(
    found: dict[str, Any], loaded: LoadedModel
) -> None:
    layers, heads = len(loaded.geometry.full_layers), loaded.model.config.num_attention_heads
    for one in found.values():
        for name in ("error", "moved"):
            values = torch.tensor(one["layers"][name])
            assert values.shape == (layers, heads)
            assert one[name]["worst"] == pytest.approx(values.max().item())
            assert one[name]["median"] <= one[name]["p90"] <= one[name]["worst"]


def test_the_reference_is_causal_attention() -> None:
    q, k, v = torch.randn(20, 6, 16), torch.randn(20, 2, 16), torch.randn(20, 2, 16)
    out, weights = attend_last(REFERENCE, q[-5:], k, v, torch.ones(2, 2), 0.25)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q, k, v)), is_causal=True, scale=0.25, enable_gqa=True
    )[0].transpose(0, 1)
    torch.testing.assert_close(out, expected[-5:])
    assert weights[:, 0, -4:].count_nonzero() == 0


def test_small_weights_are_lost_without_a_range_for_them() -> None:
    """One token outweighs 63 others by 2^11: alone below E4M3's least number, together 3 %."""
    k = torch.zeros(64, 1, 4)
    k[0, 0, 0] = 11 * torch.tensor(2.0).log()
    q, v = torch.tensor([[[1.0, 0, 0, 0]]]), torch.ones(64, 1, 4)
    entries = replace(VARIANTS["fp8_all"], entries=torch.float32, queries=torch.float32)
    lost, kept = (
        attend_last(replace(entries, weight_range=wide), q, k, v, torch.ones(1, 2), 1.0)[0]
        for wide in (1.0, fp8_products.WIDEST)
    )
    assert lost.mean() < 0.975 and kept.mean() == pytest.approx(1.0, abs=1e-5)


def test_a_query_of_zeros_stays_one() -> None:
    assert round_queries(torch.zeros(1, 2, 4), fp8_products.E4M3).equal(torch.zeros(1, 2, 4))


def test_the_program_keeps_what_it_measured(
    tmp_path: Path, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8_products, "load_model", lambda *_, **__: loaded)
    fp8_products.main(["--tokens", "40", "--last", "8", "-o", str(tmp_path)])
    content = json.loads((tmp_path / fp8_products.FILE).read_text())
    assert content["command"].endswith(f"--tokens 40 --last 8 -o {tmp_path}")
    assert content["options"]["tokens"] == 40 and list(content["variants"]) == list(VARIANTS)
