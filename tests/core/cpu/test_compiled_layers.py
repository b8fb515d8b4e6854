"""Compiled layers of several models in a process: none takes from another's limit of graphs.

The graphs run as torch operators, which needs no GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from tangram.kernels.cpu.cpu_kernels import CpuKernels
from tangram.model import experts
from tangram.model.attention import StepAttention
from tangram.model.compiled import compile_layers
from tangram.model.experts import fix_launches
from tangram.model.latent import output_like
from tests.small_engines import run, small_engine, tiny_model
from tests.tiny_configs import VOCABULARY, tiny_config

# What torch's compiler says of torch itself, and of a check that Transformers makes on a CPU.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`"),
]
# Graphs of one code that a model needs: one for a single token and one for any number, one more
# for so many tokens that experts are computed in another form, and two of layers without experts.
MOST_GRAPHS = {"llama": 2, "gpt_oss": 3, "deepseek_v3": 5}
MOST_OF_MIXED = 4  # the same for each of two kinds of layers
PROMPTS = [[5, 9, 17], [(7 * place) % 90 + 3 for place in range(40)]]


@pytest.fixture(autouse=True)
def forget_graphs() -> None:
    """Compiled graphs of a function are limited in number."""
    torch._dynamo.reset()


def limit_graphs(most: int) -> Any:
    """Make it an error that torch would compile more than so many graphs of a code."""
    return torch._dynamo.config.patch(recompile_limit=most, fail_on_recompile_limit_hit=True)


class KeptHalves(StepAttention):
    """Attention whose output is a half everywhere."""

    def __init__(self) -> None:
        pass

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        assert len(options["hidden"]) == len(q)
        return output_like(module, q).fill_(0.5)


class CountedGraphs:
    """A backend of torch.compile that runs graphs as they are."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.graphs += 1
        compiled: Callable[..., Any] = graph.forward
        return compiled


@torch.inference_mode()
def decode(model: Any, count: int) -> Tensor:
    tokens = torch.arange(3, 3 + count)[None] % VOCABULARY
    output = model(input_ids=tokens, position_ids=tokens, use_cache=False, tangram=KeptHalves())
    logits: Tensor = output.logits[0]
    return logits


@pytest.mark.parametrize("name", MOST_GRAPHS)
def test_models_of_several_dtypes_share_no_limit(
    name: str, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has its graphs, and its next passes need no more."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    monkeypatch.setattr(experts, "_MOST_TOKENS", 20)
    needed = list[int]()
    for dtype in (torch.float32, torch.bfloat16):
        model = tiny_model(tiny_config(name, num_hidden_layers=2), tokenizer, dtype=dtype).model
        fix_launches(model)
        expected, backend = [decode(model, count) for count in (1, 4, 40)], CountedGraphs()
        compile_layers(model, backend)
        with limit_graphs(MOST_GRAPHS[name]):
            for count, logits in zip((1, 4, 40), expected, strict=True):
                assert torch.equal(decode(model, count), logits)
            needed.append(backend.graphs)
            decode(model, 5)
            decode(model, 60)
        assert backend.graphs == needed[-1] > 0
    assert len(set(needed)) == 1


def test_engines_answer_as_without_compiled_layers(tokenizer: PreTrainedTokenizerBase) -> None:
    """Two over one model, and one over another."""
    models = [tiny_model(tiny_config("llama"), tokenizer) for _ in range(2)]

    def answer(number: int) -> list[list[int]]:
        return run(small_engine(models[number], CpuKernels), PROMPTS)

    expected, backend = answer(0), CountedGraphs()
    for loaded in models:
        compile_layers(loaded.model, backend)
    with limit_graphs(MOST_GRAPHS["llama"]):
        assert answer(0) == expected
        first = backend.graphs
        compile_layers(models[0].model, backend)
        assert answer(0) == expected
        assert backend.graphs == first > 0
        assert answer(1) == expected
    assert backend.graphs == 2 * first


@pytest.mark.parametrize("name", ["qwen3_next", "kimi_linear", "falcon_h1", "lfm2"])
def test_layers_with_states_are_compiled_around_their_mixers(
    name: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Each pass has other rows, for which nothing is compiled."""
    loaded = tiny_model(tiny_config(name), tokenizer)

    def answer(prompts: list[list[int]]) -> list[list[int]]:
        return run(small_engine(loaded, CpuKernels), prompts)

    asked = [PROMPTS, [PROMPTS[1] * 3, PROMPTS[1][:9], *PROMPTS], [PROMPTS[1] * 2] * 3]
    expected, backend = list(map(answer, asked)), CountedGraphs()
    compile_layers(loaded.model, backend)
    with limit_graphs(MOST_OF_MIXED):
        assert list(map(answer, asked[:2])) == expected[:2]
        needed = backend.graphs
        assert answer(asked[2]) == expected[2]
    assert backend.graphs == needed > 0
