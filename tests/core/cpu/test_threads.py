"""What a CPU computes does not depend on the number of its threads: the cells of the purity law's
table that name threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, PreTrainedTokenizerBase

from tangram.config import EngineConfig
from tangram.engine.loop import Engine
from tangram.engine.setup.build import engine_of
from tangram.model.load import load_model
from tangram.types import Event, Request, SamplingParams
from tests.core.cpu.test_purity import TINY, LonePrompts
from tests.small_engines import drain, sealed_state, tiny_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# A head keeps some 500 entries of the prompt, enough to be read by several tasks on two threads.
LONG = LlamaConfig(**(TINY.to_dict() | {"head_dim": 64, "max_position_embeddings": 1100}))
PROMPT = tuple(3 + (i * i) % 90 for i in range(1_010))
SHORT = tuple(3 + (i * 7) % 90 for i in range(40))
ANSWER = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=4)


@pytest.fixture(autouse=True)
def _same_threads_afterwards() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def answer(
    engine: Engine, *prompts: tuple[int, ...]
) -> tuple[list[list[int]], Tensor, dict[bytes, Tensor]]:
    """The tokens of the answers, the log-probabilities of the likeliest tokens, the sealed pages.

    All prompts are submitted at once.
    """
    events: list[list[Event]] = [[] for _ in prompts]
    for number, (prompt, take) in enumerate(zip(prompts, events, strict=True)):
        engine.submit(Request(str(number), prompt, ANSWER, take.append))
    drain(engine)
    told = [event for own in events for event in own]
    likely = [[value for _, value in step.top] for event in told for step in event.logprobs]
    tokens = [[token for event in own for token in event.token_ids] for own in events]
    return tokens, torch.tensor(likely), sealed_state(engine)


def same_state(found: dict[bytes, Tensor], expected: dict[bytes, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[key], expected[key]) for key in expected
    )


@pytest.mark.parametrize("kv_retention", [0.5, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_state_and_answers_have_the_same_bits_on_any_number_of_threads(
    dtype: str, kv_retention: float, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """A long row alone, then beside a short one, and both with a prefix that is cached."""
    loaded = tiny_model(LONG, tokenizer, dtype=DTYPES[dtype])
    world = LonePrompts(loaded, tmp_path, "keydiff", kv_retention=kv_retention)
    found = []
    for threads in (1, 2, 3, 1):
        engine = world.engine(threads=threads, dtype=dtype)
        assert torch.get_num_threads() == threads
        alone, beside = answer(engine, PROMPT), answer(engine, PROMPT, SHORT, (*PROMPT[:990], 5))
        found.append((alone, beside))
    for others in found[1:]:
        for (tokens, likely, state), (first_tokens, first_likely, first_state) in zip(
            others, found[0], strict=True
        ):
            assert tokens == first_tokens
            assert torch.equal(likely, first_likely)
            assert same_state(state, first_state)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.nightly)])
def test_the_embedded_model_seals_and_answers_the_same_on_any_number_of_threads(dtype: str) -> None:
    """In bfloat16 to the bit. In float32 MKL divides the sums of a prompt's last rows by threads,
    so logits may differ in their last bits (docs/architecture.md).
    """
    loaded = load_model("smollm2", dtype=dtype, device="cpu")
    text = Path(__file__).parents[3].joinpath("docs/architecture.md").read_text()
    prompt = tuple(loaded.tokenizer.encode(text)[:620])
    (tokens, likely, state), other = (
        answer(
            engine_of(
                EngineConfig(kv_retention=0.5, dtype=dtype, threads=threads, kv_cache_gib=0.25),  # type: ignore[arg-type]
                loaded,
            ),
            prompt,
        )
        for threads in (1, 2)
    )
    assert len(state) == 1 and same_state(other[2], state)
    assert other[0] == tokens
    if dtype == "bfloat16":
        assert torch.equal(other[1], likely)
    else:
        torch.testing.assert_close(other[1], likely, rtol=0, atol=1e-3)
