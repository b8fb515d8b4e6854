"""Every kernel for every card, compiled on the CPU: within what the card has."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bench.bare_tokenizer import load_tokenizer
from tangram.errors import ConfigError
from tangram.kernels.interface import KvPool
from tangram.kernels.triton import e4m3
from tangram.kernels.triton.tiling import LEAST_ENTRIES, Operands, Tile, fit_tile
from tangram_lab.baselines.compared_schedules import parse_schedule
from tests.gpu.cards import CARDS, REGISTERS, REGISTERS_A_THREAD
from tests.gpu.test_engine import LLAMA, PROMPTS, both, log_probabilities, options_of, submit_all
from tests.gpu.test_engine import pytestmark as pytestmark
from tests.small_engines import drain, tiny_model

ROOT = Path(__file__).parents[2]
KERNELS = {
    "append_entries",
    "attend_expanded",
    "attend_segments",
    "compare_keys",
    "copy_pages",
    "decode_tasks",
    "gather_chunks",
    "gather_pasts",
    "merge_segments",
    "merge_splits",
    "prefill_tiles",
    "score_tokens",
    "seal_chunk",
    "store_rows",
    "sum_directions",
}
SPILLED_BYTES = 1 << 10  # of a thread, for heads of up to 128 dimensions in 16 bits


def kernels_in(package: Path) -> set[str]:
    """Names of the kernels that are launched: those with [grid]."""
    code = "\n".join(path.read_text() for path in package.glob("*.py"))
    return set(re.findall(r"^ +(\w+)\[(?:grid|\()", code, re.M))


def compile_launches(form: str, folder: Path, *cards: str) -> list[dict[str, Any]]:
    """`tests.gpu.compiled_launches` in a process where nothing is interpreted or cached."""
    lines = folder / "compiled.jsonl"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run(
        [sys.executable, "-m", "tests.gpu.compiled_launches", form, str(lines), *cards],
        cwd=ROOT,
        env=environment | {"TRITON_CACHE_DIR": str(folder / "triton")},
        check=True,
    )
    return [json.loads(line) for line in lines.read_text().splitlines()]


def check(kernel: dict[str, Any]) -> None:
    """Within the limits of its card."""
    card = CARDS[kernel["card"]]
    assert kernel["shared_bytes"] <= card.shared_bytes, kernel
    assert 0 < kernel["registers"] <= REGISTERS_A_THREAD, kernel
    assert kernel["registers"] * 32 * kernel["warps"] <= REGISTERS, kernel
    assert kernel["spilled_bytes"] >= 0, kernel
    if kernel["head_dim"] <= 128 and kernel["dtype"] != "float32":
        assert kernel["spilled_bytes"] <= SPILLED_BYTES, kernel


@pytest.mark.parametrize(
    "cards", [(86, 100), pytest.param(tuple(CARDS), marks=pytest.mark.nightly)], ids=["two", "all"]
)
def test_a_sample_of_all_kernels_compiles_for_cards(cards: tuple[int, ...], tmp_path: Path) -> None:
    """For one whose kernels follow pages and one where they gather; nightly for every card."""
    kernels = compile_launches("short", tmp_path, *map(str, cards))
    assert kernels_in(ROOT / "tangram/kernels/triton") == KERNELS
    assert {kernel["kernel"] for kernel in kernels} == KERNELS
    for card in cards:
        own = {kernel["kernel"] for kernel in kernels if kernel["card"] == card}
        assert own >= {"decode_tasks", "merge_segments", "prefill_tiles"}
    for kernel in kernels:
        check(kernel)


@pytest.mark.nightly
@pytest.mark.parametrize("card", CARDS)
def test_every_variant_compiles(card: int, tmp_path: Path) -> None:
    kernels = compile_launches("long", tmp_path, str(card))
    by_tiles = {"attend_expanded", "attend_segments", "gather_chunks", "gather_pasts"}
    known = KERNELS - (by_tiles if card < 90 else set[str]())
    assert {kernel["kernel"] for kernel in kernels} == known
    for kernel in kernels:
        check(kernel)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("fp8", [False, True])
def test_an_h100_takes_the_tiles_measured_on_it(dim: int, element_bytes: int, fp8: bool) -> None:
    from tangram.kernels.triton import gathered, packed, prefill

    assert Tile(8, 16, 1, 1) == packed.SHORT_TILE
    assert (
        Tile(8),
        Tile(16, 64, 2),
        Tile(32, 64, 2),
        Tile(64, 64, 4, 3),
        Tile(128, 32, 4, 3),
    ) == packed.TILES
    for tile in packed.DecodeOptions().kinds:
        assert fit_tile(tile, Operands(dim, element_bytes, hops=2), CARDS[90]) == tile
    wanted = Tile(64, 64, 4, 2) if dim <= 128 else Tile(64, 32, 4, 2)
    assert prefill.tile_of(Operands(dim, element_bytes, hops=1, widens=fp8), CARDS[90]) == wanted
    if dim <= 128 and element_bytes == 2:
        assert gathered.tile_of(dim, element_bytes, CARDS[90]) == Tile(64, 64, 4, 3)


@pytest.mark.parametrize("card", CARDS)
def test_tiles_fit_the_card_and_no_smaller_than_they_must(card: int) -> None:
    from tangram.kernels.triton.tiling import count_shared_bytes

    operands, tile = Operands(256, 2, hops=2), Tile(64, stages=3)
    taken = fit_tile(tile, operands, CARDS[card])
    assert count_shared_bytes(taken, operands, CARDS[card]) <= CARDS[card].shared_bytes
    assert (taken == tile) == (card in (80, 90, 100))
    assert taken.queries == 64 and taken.entries >= LEAST_ENTRIES


def test_what_fits_no_tile_is_refused_by_name() -> None:
    refusal = r"heads of 256 .* in 32 bits .* 99 KiB .* use --dtype bfloat16"
    with pytest.raises(ConfigError, match=refusal):
        fit_tile(Tile(128, 32), Operands(256, 4, hops=2), CARDS[86])


def test_launches_are_chained_from_hopper_on() -> None:
    assert [card for card in CARDS if CARDS[card].chains] == [90, 100, 120]


def run_e4m3(x: Tensor) -> Tensor:
    """`x` through the kernels' own conversion, there or back."""
    import triton
    import triton.language as tl

    @triton.jit
    def convert(source, target, COUNT: tl.constexpr, BACK: tl.constexpr):
        n = tl.arange(0, COUNT)
        value = tl.load(source + n)
        tl.store(target + n, e4m3.from_e4m3(value) if BACK else e4m3.to_e4m3(value))

    back = x.dtype == torch.uint8
    target = torch.empty(len(x), dtype=torch.float16 if back else torch.uint8, device=x.device)
    convert[(1,)](x, target, COUNT=len(x), BACK=back)
    return target.cpu()


def test_e4m3_by_integers_is_that_of_torch(device: torch.device) -> None:
    codes = torch.arange(256).to(torch.uint8)
    torch.testing.assert_close(
        run_e4m3(codes.to(device)),
        codes.view(torch.float8_e4m3fn).half(),
        rtol=0,
        atol=0,
        equal_nan=True,
    )
    exact = codes.view(torch.float8_e4m3fn).float().nan_to_num(1.0)
    between = (exact.sort().values[:-1] + exact.sort().values[1:]) / 2  # ties
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(3329, generator=generator) * torch.logspace(-4, 3, 3329)
    nudged = torch.nextafter(exact, torch.full_like(exact, 1e9))
    values = torch.cat([exact, between, nudged, drawn]).clamp(-448, 448)
    values[7] = torch.nan
    expected = values.to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(run_e4m3(values.to(device)), expected)


def test_pairs_by_integers_are_those_of_torch() -> None:
    """The PTX of cards without FP8, one instruction after the other, for every pair of codes."""
    numbers = np.arange(1 << 16, dtype=np.uint32)
    held = {"$2": numbers | numbers[::-1] << 16}
    act: dict[str, Any] = {
        "mov.b32": lambda x: x,
        "and.b32": np.bitwise_and,
        "or.b32": np.bitwise_or,
        "shl.b32": np.left_shift,
        "shr.b32": np.right_shift,
        "add.u32": np.add,
        "sub.u32": np.subtract,
        "mul.f16x2": lambda x, y: (x.view(np.float16) * y.view(np.float16)).view(np.uint32),
    }
    for line in e4m3._CALCULATE.value.strip("{}").split(";"):
        name, _, operands = line.strip().partition(" ")
        if name in act:
            into, *given = (text.strip() for text in operands.split(","))
            values = [
                held[text] if text in held else np.full_like(numbers, int(text, 0))
                for text in given
            ]
            held[into] = act[name](*values)
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).half().numpy()
    for into, shift in (("$0", 0), ("$1", 8)):
        expected = codes[held["$2"].view(np.uint16) >> shift & 0xFF]
        np.testing.assert_array_equal(held[into].view(np.float16), expected)


@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_an_engine_on_an_older_card_answers_what_torch_answers(
    cache: str, device: torch.device, tmp_path: Path
) -> None:
    """Pages followed, not gathered; FP8 by integers."""
    from tangram.kernels.triton.triton_kernels import TritonKernels

    def on_ampere(pool: KvPool) -> TritonKernels:
        schedule = parse_schedule("aot+ctas=16+tile=16+min=16")
        return TritonKernels(pool, schedule, CARDS[86])

    loaded = tiny_model(LLAMA, load_tokenizer("smollm2"), device)
    options = options_of("llama", loaded, tmp_path) | {"kv_cache_dtype": cache}
    engines = both(loaded, options, on_ampere)
    expected, found = (submit_all(engine, PROMPTS) for engine in engines)
    for engine in engines:
        drain(engine)
    for ours, theirs in zip(found, expected, strict=True):
        assert [event.token_ids for event in ours] == [event.token_ids for event in theirs]
        close = log_probabilities(ours), log_probabilities(theirs)
        torch.testing.assert_close(*close, rtol=1e-3, atol=1e-3 if cache == "auto" else 2e-2)
