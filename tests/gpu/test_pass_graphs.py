"""When a pass is captured, how often the model runs for it, and how long its logits last.

No GPU is needed.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from bench.bare_tokenizer import load_tokenizer
from tangram.engine.passes.graphs import PassGraphs
from tangram.engine.passes.passes import Passes
from tangram.kernels.interface import PassShape
from tangram.kernels.triton.decode_buffers import DecodeShape
from tangram.model.attention import StepAttention
from tangram.types import SamplingParams
from tests.small_engines import small_engine, tiny_model
from tests.speculation import ask


class Graph(SimpleNamespace):
    """A captured pass."""


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

    def capture(self, inputs: Tensor, sizes: Sequence[int], *rest: Any) -> Any:
        self.captures += 1
        return SimpleNamespace(
            inputs=inputs, logits=torch.ones(1), blocks=None, graph=Graph(replay=self.run)
        )

    def run(self) -> None:
        self.replays += 1

    def ask(self, shape: PassShape) -> Tensor:
        """The logits of a pass of `shape`, which wants those of all its tokens."""
        attention = SimpleNamespace(
            launch=SimpleNamespace(shape=shape),
            sealing=SimpleNamespace(count_replay=lambda blocks: None),
        )
        inputs, sizes = torch.zeros(3 * shape.tokens, dtype=torch.int64), [shape.tokens] * 3
        return self.graphs.logits(inputs, sizes, cast(StepAttention, attention))


def decode_shape(tokens: int = 3, *, shared: bool = False) -> DecodeShape:
    return DecodeShape(tokens, queries=4, tile_tokens=64, shared=shared)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    made = Counted()
    monkeypatch.setattr(made.graphs, "_capture", made.capture)
    return made


def test_the_model_runs_once_for_a_pass_and_later_ones_are_replayed(counted: Counted) -> None:
    """On several devices each must, whichever of them captures: their sums would wait otherwise."""
    first, second = decode_shape(), decode_shape(shared=True)
    for number, shape in enumerate((first, decode_shape(), second, first), 1):
        counted.ask(shape)
        assert counted.runs + counted.replays == number
    assert (counted.captures, counted.replays) == (2, 2)


def test_passes_of_several_widths_are_captured_apart(counted: Counted) -> None:
    """Drafts change the width in every step, and need the same buffers."""
    for tokens in (16, 32, 16, 32):
        counted.ask(decode_shape(tokens))
    assert (counted.captures, counted.replays) == (2, 2)


def test_a_graph_over_buffers_that_were_replaced_is_captured_anew(counted: Counted) -> None:
    """It would read memory that is no longer theirs."""
    for room in (1, 1, 2, 2):
        counted.ask(replace(decode_shape(), room=room))
    assert (counted.captures, counted.replays, len(counted.graphs._captured)) == (2, 2, 1)


def test_no_graph_is_held_once_they_are_forgotten(counted: Counted) -> None:
    """NCCL waits for the last of those that hold one of its operations."""
    shape, held = decode_shape(), list[weakref.ref[Graph]]()
    capture = counted.graphs._capture

    def note(*parts: Any) -> Any:
        captured = capture(*parts)
        held.append(weakref.ref(captured.graph))
        return captured

    counted.graphs._capture = note  # type: ignore[method-assign,assignment]
    counted.ask(shape)
    counted.ask(shape)
    assert [graph() is None for graph in held] == [False]
    counted.graphs.forget()
    assert [graph() is None for graph in held] == [True]


class SharedMemory:
    """Stands for the graphs of `passes`, which share memory: a pass destroys the one before."""

    def __init__(self, passes: Passes) -> None:
        self._forward = passes.forward
        self._memory = torch.empty(0)
        self.replays = 0

    def forward(self, attention: Any, *parts: Tensor) -> Tensor:
        self._memory.fill_(torch.nan)
        self._memory = self._forward(attention, *parts)
        return self._memory

    def logits(self, inputs: Tensor, sizes: list[int], attention: StepAttention) -> Tensor:
        self.replays += 1
        return self.forward(attention, *torch.split(inputs, sizes))


def test_logits_of_a_pass_outlast_the_passes_behind_it() -> None:
    """New prompts are passes of their own, behind the one that decodes."""
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
    )
    loaded = tiny_model(config, load_tokenizer("smollm2"), torch.device("cpu"))
    prompts = [[(number * at * at + at) % 90 + 3 for at in range(20)] for number in range(7)]
    params = [
        SamplingParams(temperature=0.0, max_tokens=3 + number, ignore_eos=True)
        for number in range(7)
    ]
    engine = small_engine(loaded, max_num_seqs=3)
    passes = engine._runner.passes
    shared = SharedMemory(passes)
    passes.graphs, passes.forward = shared, shared.forward  # type: ignore[assignment, method-assign]
    found, expected = (ask(one, prompts, params) for one in (engine, small_engine(loaded)))
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert shared.replays > 10
