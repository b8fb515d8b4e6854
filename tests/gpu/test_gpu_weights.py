"""Products of rounded weights on a GPU, alone, compiled, captured, and in an engine."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn

from tangram.engine.llm import LLM
from tangram.model.gpu_weights import (
    FEW_ROWS,
    Int4GpuLinear,
    Int8GpuLinear,
    find_layout,
    multiply_tiles,
    pack_tiles,
)
from tangram.model.quantized import _round_by_torchao
from tangram.model.rounding import GROUP, round_to_8_bits
from tangram.types import SamplingParams

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch's products of a GPU"),
    # What torch's compiler says of torch itself.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
    pytest.mark.filterwarnings("ignore:\\s*Online softmax is disabled:UserWarning"),
]
FORMS = ("int8", "int4")
ROWS = (1, 5, 16, 17, 40, 100, 300)
# Inputs and outputs: whole tiles of 128 x 8, and what fills none.
SIZES = {"int8": ((1152, 640), (200, 24)), "int4": ((1152, 640), (200, 21))}
CASES = [(form, sizes) for form in FORMS for sizes in SIZES[form]]


def round_weights(form: str, sizes: tuple[int, int], device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    source = nn.Linear(*sizes, dtype=torch.bfloat16, device=device).requires_grad_(False)
    if form == "int8":
        return Int8GpuLinear(source, "map")
    if form == "fp8":
        pytest.importorskip("torchao")
        if torch.cuda.get_device_capability(device) < (8, 9):
            pytest.skip("this GPU has no products of FP8")
        return _round_by_torchao(source)
    return Int4GpuLinear(source, find_layout(pack_tiles, device))


def some_rows(count: int, inputs: int, device: torch.device) -> Tensor:
    torch.manual_seed(count)
    size = torch.logspace(-2, 2, count, device=device)[:, None]
    return (torch.randn(count, inputs, device=device) * size).bfloat16()


def exact(part: nn.Module, x: Tensor) -> Tensor:
    """The product of what both sides are rounded to, in float64."""
    if isinstance(part, Int4GpuLinear):
        product = x.double() @ packed_weights(part).double().t()
    else:
        numbers, scales = round_to_8_bits(x)
        product = numbers.double() @ part.rounded.double().t()
        product *= scales.double()[:, None] * part.scales.double()
    return product + part.bias.double()


def packed_weights(part: Int4GpuLinear) -> Tensor:
    """What PyTorch's packed product takes the weights for."""
    inputs = part.packed.shape[1] * 128
    one = torch.eye(inputs, dtype=torch.bfloat16, device=part.packed.device)
    whole = multiply_tiles(one, part.packed, part.scales).t()
    return whole[: part.out_features, : part.in_features]


def check_near(product: Tensor, expected: Tensor) -> None:
    """Each row but for bfloat16, and for steps of 8 bits that lie between two."""
    assert product.dtype == torch.bfloat16 and product.shape == expected.shape
    far = (product.double() - expected).norm(dim=1) / expected.norm(dim=1)
    assert far.max() < 0.006


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("form", "sizes"), CASES)
def test_products_are_those_of_the_rounded_weights(
    form: str, sizes: tuple[int, int], rows: int, device: torch.device
) -> None:
    part = round_weights(form, sizes, device)
    x = some_rows(rows, sizes[0], device)
    check_near(part(x), exact(part, x))


@pytest.mark.parametrize(("form", "sizes"), CASES)
def test_compiled_products_are_the_same(
    form: str, sizes: tuple[int, int], device: torch.device
) -> None:
    """One after the other, as graphs for any number of rows are met."""
    part = round_weights(form, sizes, device)
    torch._dynamo.reset()
    compiled = torch.compile(part.forward, dynamic=True)
    for rows in (300, *ROWS, FEW_ROWS, FEW_ROWS + 1):
        x = some_rows(rows, sizes[0], device)
        check_near(compiled(x), exact(part, x))


@pytest.mark.parametrize("sizes", SIZES["int4"])
def test_widened_weights_are_those_of_the_packed_product(
    sizes: tuple[int, int], device: torch.device
) -> None:
    part = round_weights("int4", sizes, device)
    assert isinstance(part, Int4GpuLinear)
    whole = part.widen()
    torch.testing.assert_close(whole, packed_weights(part), rtol=2**-7, atol=1e-6)
    assert torch.equal(torch.cat([part.widen(0, 2), part.widen(2)]), whole)
    numbers = torch.randint(0, 16, (16, 256), dtype=torch.int32, device=device)
    layout = find_layout(pack_tiles, device)
    words = pack_tiles(numbers).flatten(2)[..., layout.words.long()]
    found = ((words >> layout.shifts) & 15).unflatten(2, (8, 128)).transpose(1, 2)
    assert torch.equal(found.reshape(16, 256), numbers), "every tile has the layout of the first"
    assert part.scales.shape[0] * GROUP == part.packed.shape[1] * 128


@pytest.mark.parametrize(("form", "sizes"), CASES)
def test_a_row_alone_is_that_among_others(
    form: str, sizes: tuple[int, int], device: torch.device
) -> None:
    """Of 4 bits up to as many rows as are multiplied with packed weights."""
    part = round_weights(form, sizes, device)
    most = 300 if form == "int8" else FEW_ROWS
    x = some_rows(most, sizes[0], device)
    whole = part(x)
    for begin, end in ((0, 1), (7, 12), (16, 32), (20, 37), (0, 40), (most - 1, most)):
        assert torch.equal(part(x[begin:end]), whole[begin:end])


@pytest.mark.parametrize(("form", "sizes"), [*CASES, ("fp8", (1152, 640))])
def test_what_the_rows_beside_it_hold_changes_no_row(
    form: str, sizes: tuple[int, int], device: torch.device
) -> None:
    """Also in torchao's products, which round each row of activations by itself."""
    part = round_weights(form, sizes, device)
    x = some_rows(300, sizes[0], device)
    other = x.clone()
    other[50:] *= 1000
    assert torch.equal(part(x)[:50], part(other)[:50])


@pytest.mark.parametrize("rows", [1, 100])
@pytest.mark.parametrize("form", FORMS)
def test_a_graph_replays_products(form: str, rows: int, device: torch.device) -> None:
    """The head of a model that is not compiled is captured like this."""
    part = round_weights(form, SIZES[form][0], device)
    x = some_rows(rows, SIZES[form][0][0], device)
    part(x)
    graph, given = torch.cuda.CUDAGraph(), torch.zeros_like(x)
    with torch.cuda.graph(graph):
        product = part(given)
    given.copy_(x)
    graph.replay()
    assert torch.equal(product, part(x))


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_an_engine_answers_with_rounded_weights(
    form: str, eager: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """And captures its passes, if it may. With 4 bits the small model knows the city no more."""
    with caplog.at_level(logging.WARNING, "tangram"):
        llm = LLM(
            device="cuda",
            dtype="bfloat16",
            quantization=form,  # type: ignore[arg-type]
            kv_retention=1.0,
            kv_cache_gib=1.0,
            enforce_eager=eager,
        )
        asked = [[{"role": "user", "content": "What is the capital of France?"}]] * 3
        outputs = llm.chat(asked, SamplingParams(temperature=0.0, max_tokens=32))
    assert all("capital of France" in output.outputs[0].text for output in outputs)
    assert "CUDA graph" not in caplog.text
