"""The reference mode of `tangram eval`: heads keep what each chunk's scores give them, by both
kinds of kernels.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tangram.config import Scope
from tangram.model.load import LoadedModel
from tests.gpu.test_engine import CASES, CHUNK, PROMPTS, both, in_step, models, options_of
from tests.gpu.test_engine import pytestmark as pytestmark
from tests.interpreter import interpreter_few

__all__ = ["models"]


@pytest.mark.parametrize(
    ("case", "scope"),
    interpreter_few(
        [
            (case, scope)
            for case in ("llama", "llama, another scorer", "llama, second pass")
            for scope in ("model", "layer")
        ],
        ("llama", "layer"),
    ),
)
def test_every_step_leaves_the_pool_and_the_answers_that_torch_leaves(
    case: str, scope: Scope, models: dict[int, LoadedModel], tmp_path: Path
) -> None:
    loaded = models[id(CASES[case][0])]
    options = options_of(case, loaded, tmp_path) | {
        "reclamation": "by-input",
        "enable_prefix_caching": False,
        "scope": scope,
        "profile": (),
    }
    engines = both(loaded, options)
    in_step(engines, PROMPTS)
    assert engines[0].stats().sealed_chunks == 4


def test_the_whole_context_may_be_one_chunk(models: dict[int, LoadedModel], tmp_path: Path) -> None:
    """One-shot: a chunk as long as the longest prompt, and a shorter one that seals nothing."""
    loaded = models[id(CASES["llama"][0])]
    options = options_of("llama", loaded, tmp_path) | {
        "reclamation": "by-input",
        "enable_prefix_caching": False,
        "scope": "model",
        "profile": (),
        "chunk_tokens": 2 * CHUNK,
        "max_num_batched_tokens": 2 * CHUNK + 3,
    }
    engines = both(loaded, options)
    in_step(engines, PROMPTS)
    assert engines[0].stats().sealed_chunks == 2
