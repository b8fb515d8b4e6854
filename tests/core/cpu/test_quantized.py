"""Weights of 8 and 4 bits: how near their answers are, the law, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor, nn
from transformers import LlamaConfig, PretrainedConfig, Qwen3MoeConfig

from tangram.errors import ConfigError, ModelError
from tangram.model.config_json import read_config
from tangram.model.cpu_weights import Int4Linear, Int8Linear, Int8WeightLinear
from tangram.model.load import LoadedModel, load_model
from tangram.model.quantized import check_quantization, quantize
from tangram.model.rounding import GROUP, round_to_4_bits
from tangram.sizing.weight_size import read_weights
from tests.mentions import mentioning
from tests.small_engines import profile_file, run, sealed_state, small_engine

FORMS = ("int8", "int4")
SMALL = LlamaConfig(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=512,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
PROMPTS = [[3 + number % 90 for number in range(length)] for length in (1, 40, 130)]
needs_products = pytest.mark.skipif(
    not torch.cpu._is_avx2_supported(), reason="products of small weights need AVX2"
)
needs_vnni = pytest.mark.skipif(
    not torch.cpu._is_vnni_supported(), reason="integers are added up with AVX512-VNNI"
)
# Every product, each with the form of its weights.
PRODUCTS = (
    pytest.param(Int8Linear, "int8", id="int8", marks=needs_vnni),
    pytest.param(Int8WeightLinear, "int8", id="int8 weights", marks=needs_products),
    pytest.param(Int4Linear, "int4", id="int4", marks=needs_products),
)


@pytest.fixture(scope="module")
def rounded() -> Callable[[str], LoadedModel]:
    """The embedded model in a form."""

    @cache
    def load(form: str) -> LoadedModel:
        return load_model("smollm2", dtype="float32", quantization=form, device="cpu")

    return load


def widen_rounded(weight: Tensor, form: str) -> Tensor:
    """The numbers that the rounded weights stand for, computed apart from the products."""
    if form == "int8":
        scale = weight.abs().amax(1, keepdim=True) / 127
        return (weight / scale).round() * scale
    rounded, scales = round_to_4_bits(weight)
    step, offset = scales.float().unsqueeze(2).unbind(-1)
    return ((rounded - 8) * step + offset).flatten(1)


def twin(loaded: LoadedModel, form: str) -> nn.Module:
    """Transformers' own model with the same rounded weights in float32."""
    model = copy.deepcopy(loaded.model)
    model.set_attn_implementation("sdpa")
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.data.clone(), requires_grad=False)
    for part in model.modules():
        if type(part) is nn.Linear:
            part.weight.data = widen_rounded(part.weight.data, "int8" if part is head else form)
    return model


@pytest.mark.parametrize(("product_type", "form"), PRODUCTS)
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_is_that_of_the_rounded_weights(
    product_type: Callable[[nn.Linear], nn.Module], form: str, bias: bool
) -> None:
    torch.manual_seed(0)
    source = nn.Linear(128, 48, bias=bias).requires_grad_(False)
    x = torch.randn(2, 5, 128)
    product = product_type(source)(x)
    expected = nn.functional.linear(x, widen_rounded(source.weight.data, form), source.bias)
    assert product.shape == (2, 5, 48) and product.dtype == torch.float32
    # What is left is the rounding of x: 8 bits of the row's largest, or 8 bits of each number.
    assert (product - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize(("product_type", "form"), PRODUCTS)
def test_a_row_does_not_depend_on_the_rows_beside_it(
    product_type: Callable[[nn.Linear], nn.Module], form: str
) -> None:
    torch.manual_seed(0)
    part = product_type(nn.Linear(576, 192).requires_grad_(False))
    x = torch.randn(700, 576) * torch.logspace(-3, 3, 700)[:, None]
    whole = part(x)
    for begin, end in ((0, 1), (7, 9), (100, 116), (0, 512), (512, 700)):
        assert torch.equal(part(x[begin:end]), whole[begin:end])


def draw_blocks(kind: GGMLQuantizationType, rows: int, columns: int) -> Tensor:
    """What gguf reads from random blocks of a kind [rows, columns], with scales of real size."""
    random = np.random.default_rng(0)
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (rows, columns // block_size, block_bytes), np.uint8)
    factors = 1 if kind is GGMLQuantizationType.Q4_0 else 2
    sizes = random.uniform(0.001, 0.002, (*blocks.shape[:2], factors)).astype(np.float16)
    blocks[..., : 2 * factors] = sizes.view(np.uint8)
    return torch.from_numpy(dequantize(blocks.reshape(rows, -1), kind))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K"])
def test_blocks_of_4_bits_of_a_gguf_file_are_found_again(kind: str, dtype: torch.dtype) -> None:
    """They have 16 levels, and not every block uses the first and the last."""
    weight = draw_blocks(GGMLQuantizationType[kind], 64, 512)
    rounded, scales = round_to_4_bits(weight.to(dtype))
    step, offset = scales.float().unsqueeze(2).unbind(-1)
    found = ((rounded - 8) * step + offset).flatten(1)
    # What is left is the rounding of scales to bfloat16. Other levels would err by 2 to 3 %.
    assert (found - weight).norm() < 0.005 * weight.norm()


def test_a_group_of_one_value_keeps_it() -> None:
    rounded, scales = round_to_4_bits(torch.full((16, GROUP), 0.75))
    assert torch.equal(
        (rounded - 8) * scales[..., :1] + scales[..., 1:],
        torch.full_like(rounded, 0.75, dtype=torch.float),
    )


@needs_products
@pytest.mark.parametrize("form", FORMS)
def test_the_embedded_model_says_what_transformers_says_with_these_weights(
    form: str, loaded: LoadedModel, rounded: Callable[[str], LoadedModel]
) -> None:
    """Where Transformers is sure of a token, the rounded activations do not change it."""
    served = rounded(form)
    text = "The sky is blue because sunlight is scattered by the molecules of the air. " * 8
    ids = torch.tensor([served.tokenizer(text).input_ids])
    with torch.inference_mode():
        expected = twin(loaded, form)(ids).logits[0]
        served.model.set_attn_implementation("sdpa")
        found = served.model(ids).logits[0]
    best, second = expected.topk(2).values.unbind(-1)
    sure = best - second > 1.0
    assert sure.float().mean() > 0.5
    assert torch.equal(found.argmax(-1)[sure], expected.argmax(-1)[sure])
    divergence = nn.functional.kl_div(
        found.log_softmax(-1), expected.log_softmax(-1), log_target=True, reduction="batchmean"
    )
    assert divergence < 0.05


@needs_products
@pytest.mark.parametrize("form", FORMS)
def test_the_law_holds_with_rounded_weights(
    form: str, adopt_tiny: Callable[[PretrainedConfig], LoadedModel], tmp_path: Path
) -> None:
    """Answers and sealed chunks are the same alone, in company, and after a prefix hit."""
    loaded = adopt_tiny(SMALL)
    profile = profile_file(loaded, tmp_path)
    quantize(loaded.model, form)
    options = {"kv_retention": 0.5, "profile": (profile,)}
    engines = [small_engine(loaded, **options) for _ in PROMPTS]
    alone = [run(engine, [prompt])[0] for engine, prompt in zip(engines, PROMPTS, strict=True)]
    state = {key: pages for engine in engines for key, pages in sealed_state(engine).items()}
    company = small_engine(loaded, **options)
    assert run(company, PROMPTS) == alone
    assert run(company, PROMPTS) == alone, "the second time prefixes are hits"
    together = sealed_state(company)
    assert together.keys() >= state.keys() and state
    assert all(torch.equal(together[key], pages) for key, pages in state.items())


@needs_products
@pytest.mark.parametrize("form", FORMS)
def test_rounded_weights_take_what_size_says_and_keep_their_profiles(
    form: str, loaded: LoadedModel, rounded: Callable[[str], LoadedModel]
) -> None:
    found = rounded(form)
    said = read_weights(read_config("smollm2"), "float32", form).bytes
    assert found.weight_bytes == pytest.approx(said, rel=0.02)
    assert found.weight_bytes < 0.6 * loaded.weight_bytes
    assert found.fingerprint == loaded.fingerprint and found.dtype == loaded.dtype


def test_fp8_on_a_cpu_is_refused() -> None:
    with pytest.raises(ConfigError, match=mentioning("quantization 'fp8' int8")):
        load_model("smollm2", quantization="fp8", device="cpu")


def test_a_cpu_without_products_of_small_weights_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx2_supported", lambda: False)
    with pytest.raises(ConfigError, match=mentioning("quantization 'int8' AVX2")):
        check_quantization("int8", torch.device("cpu"))


def test_weights_that_no_whole_block_holds_are_refused(
    adopt_tiny: Callable[[PretrainedConfig], LoadedModel],
) -> None:
    odd = LlamaConfig(**{**SMALL.to_dict(), "intermediate_size": 80})
    with pytest.raises(ModelError, match=mentioning("quantization 'int4' 80 64 32 16")):
        quantize(adopt_tiny(odd).model, "int4")


def test_weights_that_no_whole_vector_holds_are_refused(
    adopt_tiny: Callable[[PretrainedConfig], LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    odd = LlamaConfig(**{**SMALL.to_dict(), "intermediate_size": 88})
    with pytest.raises(ModelError, match=mentioning("quantization 'int8' 88 16")):
        quantize(adopt_tiny(odd).model, "int8")


def test_experts_are_refused(adopt_tiny: Callable[[PretrainedConfig], LoadedModel]) -> None:
    small = {name: value for name, value in SMALL.to_dict().items() if name != "model_type"}
    experts = Qwen3MoeConfig(
        **small, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    )
    with pytest.raises(ModelError, match=mentioning("quantization 'int8' experts")):
        quantize(adopt_tiny(experts).model, "int8")
