"""When a pass is captured, and how often the model runs for it. No GPU is needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from tangram.engine.graphs import PassGraphs
from tangram.model.attention import StepAttention


class State:
    """What a graph is kept for."""


@dataclass
class Counted:
    """Passes of a model, and what a GPU would be asked for."""

    runs: int = 0
    captures: int = 0
    replays: int = 0
    graphs: PassGraphs = field(init=False)

    def __post_init__(self) -> None:
        self.graphs = PassGraphs(self.forward, torch.device("cpu"))

    def forward(self, attention: Any, *parts: Tensor) -> Tensor:
        self.runs += 1
        return torch.zeros(1)

    def capture(self, inputs: Tensor, sizes: Sequence[int], attention: Any) -> Any:
        self.captures += 1
        return SimpleNamespace(
            inputs=inputs, logits=torch.ones(1), blocks=None, graph=SimpleNamespace(replay=self.run)
        )

    def run(self) -> None:
        self.replays += 1

    def ask(self, state: State) -> Tensor:
        """The logits of a pass of three tokens that `state` fits."""
        attention = SimpleNamespace(
            kernels=SimpleNamespace(captured=state),
            padded_tokens=None,
            sealing=SimpleNamespace(count_replay=lambda blocks: None),
        )
        return self.graphs.logits(
            torch.zeros(9, dtype=torch.int64), [3, 3, 3], cast(StepAttention, attention)
        )


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    made = Counted()
    monkeypatch.setattr(made.graphs, "_capture", made.capture)
    monkeypatch.setattr(
        made.graphs, "_warm_up", lambda parts, attention: made.forward(attention, *parts)
    )
    return made


def test_a_pass_is_captured_once_and_replayed(counted: Counted) -> None:
    first, second = State(), State()
    for state in (first, first, second, first):
        assert counted.ask(state).item() == 1
    assert (counted.captures, counted.replays) == (2, 4)


def test_on_several_devices_the_model_runs_once_for_a_pass(counted: Counted) -> None:
    """Whichever of them captures: their sums would wait for each other otherwise."""
    before, during = State(), State()
    counted.ask(before)
    counted.graphs.run_first()
    counted.runs = counted.replays = 0
    asked = [before, during, during, before]
    for number, state in enumerate(asked, 1):
        counted.ask(state)
        assert counted.runs + counted.replays == number
    assert (counted.captures, counted.runs) == (2, 1)
