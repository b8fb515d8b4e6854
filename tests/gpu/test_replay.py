"""A pass that the GPU's kernels have failed at is computed again by the reference."""

from __future__ import annotations

from pathlib import Path

import pytest

from tangram.engine.passes.passes import Passes
from tangram.engine.passes.saved_pass import load_pass
from tangram.engine.replay import replay, replay_config
from tangram.model.load import LoadedModel
from tests.gpu.test_engine import CASES, PROMPTS, models, on_triton, options_of, submit_all
from tests.gpu.test_engine import pytestmark as pytestmark
from tests.small_engines import drain, small_engine

__all__ = ["models"]


@pytest.mark.parametrize("ahead", [False, True])
def test_what_the_gpu_has_planned_is_replayed(
    models: dict[int, LoadedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    """Split heads, and rows that are padded to a width."""
    case, folder = "gpt-oss, windows and sinks", tmp_path / "failed"
    loaded = models[id(CASES[case][0])]
    options = options_of(case, loaded, tmp_path) | {"save_failed_passes": str(folder)}
    engine = small_engine(loaded, on_triton, **options)
    engine.ahead = ahead
    answers = submit_all(engine, PROMPTS)
    drain(engine)
    events = submit_all(engine, PROMPTS)
    while min(map(len, events)) < 2:
        engine.step()
    with monkeypatch.context() as patch, pytest.raises(TypeError):
        patch.setattr(Passes, "finish", None)  # a graph calls nothing before
        engine.step()
    saved = load_pass(next(folder.iterdir()))
    decode = saved.work.addresses.decode
    assert decode is not None and (decode.tokens, decode.width) == (3, 4)
    assert len(decode.plan.segments), "no head is split"
    found = replay(saved, replay_config(saved, kv_cache_gib=0.01), loaded)
    assert found.unsound is None
    # An engine that is ahead has tokens whose events have not come yet.
    tokens = [[token for event in own for token in event.token_ids] for own in answers]
    for row in found.rows:
        number = int(row.request_id)
        assert row.next_token == tokens[number][row.start + row.tokens - len(PROMPTS[number])]
    assert len(found.rows) == len(PROMPTS)
