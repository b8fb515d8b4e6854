"""Experts on a GPU: the same launches wherever tokens are sent, and Transformers' answers.

No GPU is needed. Tensors on PyTorch's device "meta" have no numbers, so whatever reads one on the
host fails there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import groupby, product
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.moe import ExpertsInterface
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from tangram.model import experts
from tangram.model.attention import IMPLEMENTATION
from tangram.model.experts import compute_experts, fix_launches
from tangram.model.latent import output_like, pass_latents
from tests.families import SERVED, read_verdicts, spread_weights
from tests.tiny_configs import VOCABULARY, tiny_config

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Transformers lets nobody replace their experts, whose rows the host counts.
OWN_LOOPS = {"dbrx", "jetmoe", "longcat_flash"}
# Every expert computes every token, so nothing is replaced.
EVERY_EXPERT = {"llama4", "llama4_text"}
# The host computes its rotary frequencies anew in every pass.
OWN_ROTARY = {"phimoe"}
PUBLISHED = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "gpt_oss", "qwen3_moe")
WITH_EXPERTS = frozenset(
    name
    for name, verdict in read_verdicts().items()
    if verdict == SERVED
    and " " not in name
    and any(word in str(tiny_config(name).to_dict()) for word in ("experts", "moe_"))
)


class Halves:
    """Attention whose output is a half everywhere."""

    decodes_only = True

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return output_like(module, q).fill_(0.5)


class NoHost(TorchDispatchMode):
    """Refuses what no CUDA graph holds: tensors of the host, and operators that may read them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        found = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
        assert all(leaf.is_meta for leaf in found), f"{func} has a tensor of the host"
        assert func.namespace == "aten", f"{func} may do anything"
        return result


def build(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    transformers.logging.set_verbosity_error()
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        tiny_config(name, **changes), attn_implementation=IMPLEMENTATION, dtype=dtype
    )
    model.train(False).requires_grad_(False)
    pass_latents(model)
    return model


@torch.inference_mode()
def decode(model: PreTrainedModel, count: int) -> Tensor:
    """Logits [count, V] of a pass."""
    tokens = torch.arange(3, 3 + count, device=model.device)[None] % VOCABULARY
    wanted = torch.arange(count, device=model.device)
    output: Any = model(
        input_ids=tokens,
        position_ids=tokens,
        use_cache=False,
        logits_to_keep=wanted,
        tangram=Halves(),
    )
    logits: Tensor = output.logits[0]
    return logits


def on_card(model: PreTrainedModel, card: tuple[int, int], patch: pytest.MonkeyPatch) -> None:
    """Prepare `model` as for a GPU of a compute capability."""
    patch.setattr(torch.cuda, "get_device_capability", lambda device: card)
    fix_launches(model)


@pytest.mark.parametrize(
    ("name", "dtype", "card"),
    [
        *product(PUBLISHED, DTYPES, [(9, 0), (8, 9)]),
        *product(sorted(WITH_EXPERTS - {*PUBLISHED, *OWN_ROTARY}), [torch.float16], [(9, 0)]),
    ],
)
def test_no_pass_that_decodes_waits_for_the_host(
    name: str, dtype: torch.dtype, card: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CUDA graph holds it then; an operator that may read a number of a tensor fails."""
    model = build(name, dtype).to("meta")
    on_card(model, card, monkeypatch)
    own = name in OWN_LOOPS
    with pytest.raises((NotImplementedError, RuntimeError)) if own else nullcontext(), NoHost():
        for count in (1, 4, 256):
            assert decode(model, count).is_meta


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_of_torch_is_called_where_it_is_one(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = set[tuple[int, int]]()
    for card in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0)):
        model = build("qwen3_moe", dtype)
        on_card(model, card, monkeypatch)
        if model.get_experts_implementation()[""] == "grouped_mm":
            chosen.add(card)
    assert chosen == ({(9, 0), (10, 0)} if dtype is torch.bfloat16 else set())


@pytest.mark.parametrize("name", sorted(WITH_EXPERTS - OWN_LOOPS - EVERY_EXPERT))
def test_answers_are_those_of_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loop over experts, which computes for each only what it is asked."""
    model = build(name)
    spread_weights(model)
    model.set_experts_implementation("eager")
    counts = (1, 2, 7, 40)
    expected = [decode(model, count) for count in counts]
    model.set_experts_implementation("grouped_mm")
    on_card(model, (8, 9), monkeypatch)
    for count, logits in zip(counts, expected, strict=True):
        torch.testing.assert_close(decode(model, count), logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_every_form_gives_the_same_answer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few of many experts are copied, all are asked for some tokens, many tokens are sorted."""
    field = "num_experts" if name == "qwen3_moe" else "num_local_experts"
    model = build(name, **{field: 16})
    spread_weights(model)
    forms = list[str]()
    for form in ("batched_mm", "grouped_mm"):
        monkeypatch.setitem(ExpertsInterface._global_mapping, form, note(form, forms))
    monkeypatch.setattr(experts, "_MOST_TOKENS", 8)
    model.set_experts_implementation("eager")
    expected = [decode(model, count) for count in (2, 8, 9)]
    on_card(model, (8, 9), monkeypatch)
    assert model.get_experts_implementation()[""] == "eager", "somebody else's choice stays"
    model.set_experts_implementation("grouped_mm")
    on_card(model, (8, 9), monkeypatch)
    for count, logits in zip((2, 8, 9), expected, strict=True):
        torch.testing.assert_close(decode(model, count), logits, rtol=1e-4, atol=1e-4)
    assert [form for form, _ in groupby(forms)] == ["batched_mm", "grouped_mm"]


def note(form: str, forms: list[str]) -> Callable[..., Tensor]:
    """Transformers' form of experts, which notes that it was called."""
    real = ExpertsInterface._global_mapping[form]

    def compute(*arguments: Any) -> Tensor:
        forms.append(form)
        answer: Tensor = real(*arguments)
        return answer

    return compute


def make_layer() -> Any:
    torch.manual_seed(0)
    config: Any = tiny_config("mixtral")
    layer = MixtralExperts(config)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.2)
    return layer.requires_grad_(False)


def test_an_expert_that_is_not_asked_may_be_infinite() -> None:
    layer = make_layer()
    hidden, chosen = torch.randn(3, 48), torch.tensor([[0, 2], [2, 0], [0, 2]])
    shares = torch.rand(3, 2)
    expected = compute_experts(layer, hidden, chosen, shares)
    layer.down_proj[1] = torch.inf
    assert torch.equal(compute_experts(layer, hidden, chosen, shares), expected)
    assert expected.isfinite().all()


def test_experts_of_other_ranks_add_nothing() -> None:
    """Transformers numbers them behind the last of a rank's own."""
    layer = make_layer()
    hidden, shares = torch.randn(3, 48), torch.rand(3, 2)
    chosen = torch.tensor([[0, 2], [4, 1], [4, 4]])
    given = torch.where(chosen == 4, 0, shares)
    expected = layer(hidden, chosen.clamp(max=3), given)
    torch.testing.assert_close(compute_experts(layer, hidden, chosen, given), expected)
    assert not compute_experts(layer, hidden, chosen, given)[2].any()
