"""What is measured over the Triton kernels: the chunks that torch sees, the device's time without
waiting for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tangram.kernels import stopwatch
from tangram.kernels.stopwatch import Stopwatch
from tangram.model.load import LoadedModel
from tests.gpu.test_engine import CASES, PROMPTS, both, models, options_of, submit_all
from tests.interpreter import interpreter_few
from tests.small_engines import drain

__all__ = ["models"]
# What torch's compiler says of torch itself.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
    pytest.mark.filterwarnings("ignore:\\s*Online softmax is disabled:UserWarning"),
]


@pytest.mark.parametrize(
    ("every", "case"),
    interpreter_few(
        [
            (every, case)
            for every in (1, 2)
            for case in ("llama", "llama, second pass", "gpt-oss, windows and sinks")
        ],
        (1, "llama, second pass"),
    ),
)
def test_sampled_chunks_wish_what_they_wish_on_torch(
    case: str, every: int, models: dict[int, LoadedModel], tmp_path: Path
) -> None:
    """Sealed one by one or, where scores come with the kernels, side by side."""
    loaded = models[id(CASES[case][0])]
    engines = both(loaded, options_of(case, loaded, tmp_path) | {"overflow_every": every})
    figures = []
    for engine in engines:
        submit_all(engine, PROMPTS)
        drain(engine)
        if engine.device.type == "cuda":
            torch.cuda.synchronize()
        stats = engine.stats()
        assert stats.sealing_s > 0
        assert {line.chunks for line in stats.overflow} == {stats.sealed_chunks // every}
        figures.append(
            np.array([[line.wished, line.lost, line.exceeded] for line in stats.overflow])
        )
    assert figures[0][:, 0].sum() == figures[1][:, 0].sum() > 0
    # Scores differ in the last bits: an entry or two may change sides.
    assert np.abs(figures[0] - figures[1]).max() <= 2


class PassingEvent:
    """An event that the test lets pass."""

    passed: set[int] = set()  # noqa: RUF012 (the test's own)
    made = 0

    def __init__(self, external: bool) -> None:
        PassingEvent.made += 1
        self.number = PassingEvent.made

    def record(self, stream: Any) -> None:
        PassingEvent.passed.discard(self.number)

    def query(self) -> bool:
        return self.number in PassingEvent.passed

    def elapsed_time(self, end: PassingEvent) -> float:
        assert self.query() and end.query(), "it would wait"
        return 250.0


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Stopwatch:
    """Of a GPU whose events pass when the test says so."""
    monkeypatch.setattr(stopwatch, "_event", PassingEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(PassingEvent, "passed", set())
    monkeypatch.setattr(PassingEvent, "made", 0)
    return Stopwatch(torch.device("cuda"))


def test_a_stopwatch_counts_every_replay_of_a_graph(
    watch: Stopwatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as capture:
        capture.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        for _ in range(2):
            with watch.timing():
                pass
    blocks = watch.take_blocks()
    watch.collect()
    assert watch.seconds == 0, "a capture is not a run"
    for _ in range(3):
        watch.count_replay(blocks)
    watch.collect()
    assert watch.seconds == 0, "the last one is not through"
    PassingEvent.passed |= set(range(1, PassingEvent.made + 1))
    watch.collect()
    assert watch.seconds == 3 * 2 * 0.25
    watch.collect()
    assert watch.seconds == 3 * 2 * 0.25, "once"
    assert watch.take_blocks().events == (), "the next graph has blocks of its own"


def test_a_stopwatch_reads_events_when_they_have_passed(watch: Stopwatch) -> None:
    for _ in range(2):
        with watch.timing():
            pass
    watch.collect()
    assert watch.seconds == 0, "nothing has passed yet"
    PassingEvent.passed |= {1, 2}
    watch.collect()
    assert watch.seconds == 0.25
    with watch.timing():
        pass
    assert PassingEvent.made == 4, "events that have passed are used again"
    PassingEvent.passed |= {1, 2, 3, 4}
    watch.collect()
    assert watch.seconds == 0.75


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU's clock")
def test_a_stopwatch_measures_the_device_and_not_the_launch() -> None:
    device = torch.device("cuda")
    watch, matrix = Stopwatch(device), torch.ones(8192, 8192, device=device)
    torch.cuda.synchronize()
    with watch.timing():
        for _ in range(20):
            matrix @ matrix
    watch.collect()
    assert watch.seconds == 0, "the host is far ahead"
    torch.cuda.synchronize()
    watch.collect()
    assert watch.seconds > 0.01
