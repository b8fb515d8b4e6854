"""What a CPU can show of rounded weights on a GPU: rows that are added and cut off, the layout of
PyTorch's 4-bit packing, and what is refused.

The products themselves are checked in `tests/gpu/test_gpu_weights.py`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import LlamaConfig, PretrainedConfig, PreTrainedModel

from tangram.errors import ConfigError, ModelError
from tangram.model import gpu_weights
from tangram.model.compiled import compile_layers
from tangram.model.gpu_weights import FEW_ROWS, Int4GpuLinear, Int8GpuLinear, find_layout
from tangram.model.load import LoadedModel
from tangram.model.modules import CompiledPart
from tangram.model.quantized import check_quantization, held_bytes, quantize
from tangram.model.rounding import GROUP, round_to_4_bits, round_to_8_bits
from tests.core.cpu.test_quantized import PROMPTS, SMALL
from tests.mentions import mentioning
from tests.small_engines import profile_file, run, sealed_state, small_engine

# What torch's compiler says of torch itself.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
ROWS = (1, 5, 16, 17, 40, 100, 300)
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
# A packing of our own: any order of the 1,024 numbers of a tile.
ORDER = torch.randperm(1024, generator=torch.Generator().manual_seed(3))


def pack(numbers: Tensor) -> Tensor:
    outputs, inputs = numbers.shape
    tiles = numbers.long().view(outputs // 8, 8, inputs // 128, 128).transpose(1, 2)
    places = tiles.flatten(2)[..., ORDER].unflatten(2, (128, 8))
    words = (places << torch.arange(0, 32, 4)).sum(-1)
    signed = torch.where(words < 1 << 31, words, words - (1 << 32))
    return signed.int().view(outputs // 8, inputs // 128, 32, 4)


def unpack(words: Tensor) -> Tensor:
    tiles, across = words.shape[:2]
    places = (words.view(tiles, across, 128, 1) >> torch.arange(0, 32, 4)) & 15
    numbers = torch.empty(tiles, across, 1024, dtype=torch.int32)
    numbers[..., ORDER] = places.flatten(2).int()
    return numbers.view(tiles, across, 8, 128).transpose(1, 2).reshape(tiles * 8, -1)


def multiply(rows: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    step, offset = scales.transpose(0, 1).repeat_interleave(GROUP, 1).float().unbind(-1)
    return rows @ ((unpack(packed) - 8) * step + offset).bfloat16().t()


@pytest.fixture(autouse=True)
def packs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our packing takes the place of PyTorch's, which is for GPUs alone."""
    monkeypatch.setattr(gpu_weights, "pack_tiles", pack)
    monkeypatch.setattr(gpu_weights, "multiply_tiles", multiply)


def four_bits(inputs: int, outputs: int, bias: bool = True) -> tuple[nn.Linear, Int4GpuLinear]:
    torch.manual_seed(0)
    source = nn.Linear(inputs, outputs, bias=bias, dtype=torch.bfloat16).requires_grad_(False)
    return source, Int4GpuLinear(source, find_layout(pack, CPU))


def eight_bits(bias: bool = True) -> tuple[nn.Linear, Int8GpuLinear]:
    torch.manual_seed(0)
    source = nn.Linear(264, 48, bias=bias, dtype=torch.bfloat16).requires_grad_(False)
    return source, Int8GpuLinear(source, "map")


def on_gpu(model: PreTrainedModel, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Round `model` as if it were on a GPU."""
    with monkeypatch.context() as changed:
        changed.setattr(PreTrainedModel, "device", property(lambda model: CUDA))
        quantize(model, form)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_a_product_of_8_bits_is_exact_but_for_its_last_rounding(rows: int, bias: bool) -> None:
    source, part = eight_bits(bias)
    x = torch.randn(1, rows, 264, dtype=torch.bfloat16) * torch.logspace(-3, 3, rows)[:, None]
    x = x.bfloat16()
    numbers, scales = round_to_8_bits(x[0])
    weight, steps = round_to_8_bits(source.weight.data)
    exact = (numbers.double() @ weight.double().t()) * scales.double()[:, None] * steps.double()
    expected = exact.float() + (source.bias if bias else 0)
    product = part(x)
    assert product.shape == (1, rows, 48) and product.dtype == torch.bfloat16
    torch.testing.assert_close(product[0].float(), expected, rtol=2**-8, atol=1e-6)


def test_rows_are_added_in_front_of_the_product_of_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 rows and fewer are refused by it."""
    _, part = eight_bits()
    given, multiply = list[Tensor](), torch._int_mm
    monkeypatch.setattr(torch, "_int_mm", lambda a, b: given.append(a) or multiply(a, b))
    for rows in ROWS:
        part(torch.randn(rows, 264, dtype=torch.bfloat16))
    assert [len(one) for one in given] == [32, 32, 32, 32, 64, 128, 320]
    assert all(not one[rows:].any() for one, rows in zip(given, ROWS, strict=True))


def test_a_row_of_8_bits_alone_is_that_among_others() -> None:
    _, part = eight_bits()
    x = (torch.randn(300, 264) * torch.logspace(-3, 3, 300)[:, None]).bfloat16()
    whole = part(x)
    for begin, end in ((0, 1), (7, 9), (100, 117), (0, 40), (200, 300)):
        assert torch.equal(part(x[begin:end]), whole[begin:end])


def test_no_rows_have_no_products() -> None:
    nothing = torch.empty(1, 0, 264, dtype=torch.bfloat16)
    assert eight_bits()[1](nothing).shape == (1, 0, 48)
    assert four_bits(264, 24)[1](nothing).shape == (1, 0, 24)


@pytest.mark.parametrize(("form", "graphs"), [("int8", 2), ("int4", 3)])
def test_compiled_products_are_the_same_and_need_few_graphs(form: str, graphs: int) -> None:
    """One row is a graph of its own, and so are few rows of 4 bits."""
    part = eight_bits()[1] if form == "int8" else four_bits(264, 24)[1]
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(part.forward, dynamic=True, backend=counter)
    for rows in (300, *ROWS):
        x = torch.randn(1, rows, 264, dtype=torch.bfloat16)
        assert torch.equal(compiled(x), part(x))
    assert counter.frame_count == graphs


@pytest.mark.parametrize(("inputs", "outputs"), [(12, 16), (16, 12)])
def test_sizes_that_the_product_of_8_bits_refuses_are_refused_by_name(
    inputs: int, outputs: int
) -> None:
    name = "model.layers.0.mlp.up_proj"
    with pytest.raises(ModelError, match=mentioning(f"{name} {inputs} {outputs} 8")):
        Int8GpuLinear(nn.Linear(inputs, outputs), name)


def test_the_layout_of_a_packing_is_found() -> None:
    layout = find_layout(pack, CPU)
    numbers = torch.randint(0, 16, (8, 128), dtype=torch.int32)
    words = pack(numbers).flatten()
    found = (words[layout.words] >> layout.shifts) & 15
    assert torch.equal(found.view(8, 128), numbers)


def test_a_packing_that_loses_numbers_is_refused() -> None:
    with pytest.raises(ModelError, match=mentioning("'int4' torch 8 128 int8")):
        find_layout(lambda numbers: pack(numbers.clamp(max=14)), CPU)


@pytest.mark.parametrize(("inputs", "outputs"), [(256, 24), (200, 21), (40, 3)])
def test_widened_weights_are_those_that_were_packed(inputs: int, outputs: int) -> None:
    """Inputs that fill no tile are added as zeros and cut off, outputs too."""
    source, part = four_bits(inputs, outputs)
    whole = nn.functional.pad(source.weight.data, (0, -inputs % 128))
    numbers, scales = round_to_4_bits(whole)
    step, offset = scales.double().unsqueeze(2).unbind(-1)
    expected = ((numbers - 8) * step + offset).flatten(1)[:, :inputs]
    torch.testing.assert_close(part.widen().double(), expected, rtol=2**-8, atol=0)
    assert part.widen().shape == (outputs, inputs)


@pytest.mark.parametrize("rows", [*ROWS, FEW_ROWS, FEW_ROWS + 1])
def test_few_rows_take_the_packed_weights_and_many_the_widened(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed_rows = list[int]()
    monkeypatch.setattr(
        gpu_weights,
        "multiply_tiles",
        lambda rows, *weights: packed_rows.append(len(rows)) or multiply(rows, *weights),
    )
    source, part = four_bits(200, 21)
    x = torch.randn(2, rows, 200, dtype=torch.bfloat16)
    expected = nn.functional.linear(x.double(), part.widen().double(), source.bias.double())
    assert (part(x) - expected).norm() < 0.01 * expected.norm()
    assert packed_rows == ([2 * rows] if 2 * rows <= FEW_ROWS else [])


def test_weights_that_are_widened_in_parts_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    _, part = four_bits(200, 45)
    x = torch.randn(FEW_ROWS + 1, 200, dtype=torch.bfloat16)
    whole, widths = part(x), list[int]()
    widen = part.widen
    monkeypatch.setattr(
        part, "widen", lambda *tiles: widths.append(len(widen(*tiles))) or widen(*tiles)
    )
    monkeypatch.setattr(gpu_weights, "_WIDENED", 2 * 2 * 1024)
    torch.testing.assert_close(part(x), whole)
    assert widths == [16, 16, 13]


def test_a_model_on_a_gpu_is_rounded_to_8_bits_with_its_head(
    adopt_tiny: Callable[[PretrainedConfig], LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it takes is a byte for each weight, and a scale for each output."""
    model = adopt_tiny(SMALL).model
    maps = {name: part for name, part in model.named_modules() if type(part) is nn.Linear}
    plain = held_bytes(model)
    on_gpu(model, "int8", monkeypatch)
    parts = [part for part in model.modules() if isinstance(part, Int8GpuLinear)]
    assert len(parts) == 2 * 4 + 1, "queries, keys and values are one product, gate and up, too"
    assert not [part for part in model.modules() if type(part) is nn.Linear]
    saved = sum(3 * part.weight.numel() - 4 * part.out_features for part in maps.values())
    assert held_bytes(model) == plain - saved


def test_the_law_holds_with_8_bits_of_a_gpu(
    adopt_tiny: Callable[[PretrainedConfig], LoadedModel],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Answers and sealed chunks are the same alone and in company."""
    loaded = adopt_tiny(SMALL)
    profile = profile_file(loaded, tmp_path)
    on_gpu(loaded.model, "int8", monkeypatch)
    options = {"kv_retention": 0.5, "profile": (profile,)}
    engines = [small_engine(loaded, **options) for _ in PROMPTS]
    alone = [run(engine, [prompt])[0] for engine, prompt in zip(engines, PROMPTS, strict=True)]
    state = {key: pages for engine in engines for key, pages in sealed_state(engine).items()}
    company = small_engine(loaded, **options)
    assert run(company, PROMPTS) == alone
    together = sealed_state(company)
    assert state and all(torch.equal(together[key], pages) for key, pages in state.items())


def test_odd_sizes_on_a_gpu_are_refused_with_the_map(
    adopt_tiny: Callable[[PretrainedConfig], LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = LlamaConfig(**{**SMALL.to_dict(), "vocab_size": 97})
    with pytest.raises(ModelError, match=mentioning("lm_head 64 97")):
        on_gpu(adopt_tiny(odd).model, "int8", monkeypatch)


def test_a_rounded_head_is_compiled_once(
    adopt_tiny: Callable[[PretrainedConfig], LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in no layer."""
    model = adopt_tiny(SMALL).model
    on_gpu(model, "int8", monkeypatch)
    compile_layers(model)
    head = model.get_output_embeddings()
    assert isinstance(head, CompiledPart)
    compile_layers(model)
    assert model.get_output_embeddings() is head


@pytest.mark.parametrize(
    ("form", "capability", "what"),
    [
        ("int8", (7, 0), "'int8' 7.5 7.0 quantization"),
        ("int4", (7, 5), "'int4' 8.0 7.5 int8"),
        ("fp8", (8, 6), "'fp8' 8.9 8.6 int8"),
    ],
)
def test_a_gpu_that_is_too_old_is_refused(
    form: str, capability: tuple[int, int], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    with pytest.raises(ConfigError, match=mentioning(what)):
        check_quantization(form, CUDA)


def test_fp8_alone_needs_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_quantization("int8", CUDA)
    check_quantization("int4", CUDA)
    with pytest.raises(ConfigError, match=mentioning("'fp8' torchao")):
        check_quantization("fp8", CUDA)
