"""The embedded model on a GPU says what it says on the CPU, and its cache depends on nothing but
tokens and profile.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tangram.engine.llm import LLM, CompletionOutput
from tangram.types import SamplingParams

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="compares a GPU with the CPU"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
    pytest.mark.filterwarnings("ignore:\\s*Online softmax is disabled:UserWarning"),
]
LONG = "The lighthouse keeper wrote down the weather, the ships and the birds of every day. " * 60
QUESTIONS = (
    "What is the capital of France?",
    "Count from one to twenty.",
    3 * LONG + "What did the keeper write down?",
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=48, logprobs=5)
# A first token that differs must have been nearly as likely on the CPU, by so much of its
# log-probability.
NEAR = {"float32": 0.01, "bfloat16": 0.35, "float16": 0.05}


def chats(llm: LLM) -> list[CompletionOutput]:
    outputs = llm.chat([[{"role": "user", "content": question}] for question in QUESTIONS], GREEDY)
    return [output.outputs[0] for output in outputs]


@pytest.fixture(scope="module")
def on_cpu() -> list[CompletionOutput]:
    return chats(LLM(kv_retention=1.0, device="cpu", dtype="float32", kv_cache_gib=1.0))


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("dtype", NEAR)
def test_greedy_answers_are_those_of_the_cpu(
    dtype: str, eager: bool, on_cpu: list[CompletionOutput]
) -> None:
    llm = LLM(kv_retention=1.0, device="cuda", dtype=dtype, kv_cache_gib=1.0, enforce_eager=eager)  # type: ignore[arg-type]
    for ours, expected in zip(chats(llm), on_cpu, strict=True):
        pairs = zip(ours.token_ids, expected.token_ids, strict=False)
        first = next((place for place, (one, other) in enumerate(pairs) if one != other), None)
        if first is None:
            assert len(ours.token_ids) == len(expected.token_ids), "one of them ended"
        else:
            assert expected.logprobs is not None
            likely = dict(expected.logprobs[first].top)
            assert ours.token_ids[first] in likely, "the CPU had not thought of it"
            assert max(likely.values()) - likely[ours.token_ids[first]] < NEAR[dtype]


def read_sealed(llm: LLM) -> dict[bytes, Tensor]:
    """What heads hold of sealed chunks, by the key of their tokens: [heads of pages, 2, P, D]."""
    layout, pool = llm.engine.admission.retentions[0].layout, llm.engine._runner.pool
    # A group of fewer heads than a page has space for leaves the rest of its pages as they were.
    members = torch.tensor([len(group) for group in layout.groups]).repeat_interleave(
        torch.tensor(layout.sealed_pages)
    )
    held = torch.arange(layout.heads_per_page) < members[:, None]
    nodes = llm.engine._scheduler.cache.prefix.nodes.values()
    return {
        node.key: pool[node.pages][held.to(pool.device)] for node in nodes if not node.transient
    }


def test_sealed_pages_do_not_depend_on_the_batch() -> None:
    """The same entries stay, whoever else was in the step; their values agree but for the order of
    sums.
    """
    texts = [f"{number}. {LONG}" for number in range(6)]
    # Only keydiff seals the chunks of one step together.
    options = {
        "scorer": "keydiff",
        "kv_retention": 0.5,
        "device": "cuda",
        "dtype": "float32",
        "kv_cache_gib": 2.0,
    }
    short = SamplingParams(temperature=0.0, max_tokens=600, ignore_eos=True)
    together = LLM(**options, max_num_batched_tokens=4096)  # type: ignore[arg-type]
    together.generate(texts, short)
    alone = LLM(**options)  # type: ignore[arg-type]
    alone.generate(texts[2], short)
    expected, found = read_sealed(alone), read_sealed(together)
    shared = expected.keys() & found.keys()
    assert len(shared) >= 2
    for key in shared:
        torch.testing.assert_close(found[key], expected[key], rtol=1e-3, atol=1e-3)
