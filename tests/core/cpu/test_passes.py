"""What a pass says once it is built."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from transformers import PretrainedConfig

from tangram.cache.retention import Retention
from tangram.engine.passes.forward_pass import Pass
from tangram.model.load import LoadedModel
from tangram.types import SamplingParams
from tests.core.cpu.test_broken_logits import TINY, prompt
from tests.small_engines import profile_file, run, small_engine
from tests.speculation import METHODS, draft_always


@pytest.fixture(scope="module")
def model(adopt_tiny: Callable[[PretrainedConfig], LoadedModel]) -> LoadedModel:
    return adopt_tiny(TINY)


def numbers_in(value: Any) -> Iterator[Any]:
    """Copies of all arrays in `value`, and everything else that has no parts."""
    if isinstance(value, np.ndarray):
        yield value.tolist()
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield from numbers_in(getattr(value, name))
    elif is_dataclass(value) and not isinstance(value, Retention):
        for field in fields(value):
            yield from numbers_in(getattr(value, field.name))
    elif isinstance(value, tuple):
        for part in value:
            yield from numbers_in(part)
    else:
        yield value


@pytest.mark.parametrize("drafts", [{}, {"speculative_config": METHODS["ngram"]}])
def test_nothing_changes_a_pass_once_it_is_built(
    drafts: dict[str, Any], model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences go on, chunks are sealed, pages given to others, and tokens become known."""
    options = drafts | {"kv_retention": 0.5, "profile": profile_file(model, tmp_path)}
    engine = draft_always(small_engine(model, max_model_len=200, max_num_seqs=2, **options))
    engine.ahead = not drafts
    batcher = engine._runner.passes.batcher
    build, built = batcher.build, list[tuple[Pass, list[Any]]]()

    def note(*args: Any, **rest: Any) -> Pass:
        work = build(*args, **rest)
        built.append((work, list(numbers_in(work))))
        return work

    monkeypatch.setattr(batcher, "build", note)
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    run(engine, [prompt(70, 3), prompt(41, 5), prompt(20, 7)], params)
    assert len(built) > 40
    assert all(list(numbers_in(work)) == numbers for work, numbers in built)
