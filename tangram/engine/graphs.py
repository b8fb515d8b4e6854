"""Decode steps as CUDA graphs: captured once a batch width, replayed under plans that change."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from tangram.kernels.transfer import staged
from tangram.model.attention import AttentionContext, StepAttention
from tangram.types import Int64

_log = logging.getLogger("tangram")

# The attention of a pass, tokens [T], positions [T] and the places [n] of those wanted → their logits [n, V].
Forward = Callable[[AttentionContext, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class _Captured:
    """`inputs` int64 [3, width] is read by every replay of `graph`, which writes `logits`."""

    graph: Any
    inputs: Tensor
    logits: Tensor


class DecodeGraphs:
    """Runs decode passes of one model by `forward`. What a model does that no graph can hold is run as it is.

    A graph is kept as long as what the kernels say it was captured with.
    """

    def __init__(self, forward: Forward, device: torch.device) -> None:
        self._forward, self._device = forward, device
        self._captured = WeakKeyDictionary[object, _Captured]()
        self._memory: Any = None
        self._refused = False

    def logits(self, tokens: Int64, positions: Int64, attention: StepAttention) -> Tensor:
        """Logits [width, V] of a step that only decodes; they hold until the next one."""
        new = torch.from_numpy(tokens), torch.from_numpy(positions), torch.arange(len(tokens))
        inputs = staged(torch.stack(new).numpy(), self._device)
        known = self._graph(inputs, attention)
        if known is None:
            return self._forward(attention, *inputs.to(self._device, non_blocking=True))
        known.inputs.copy_(inputs, non_blocking=True)
        known.graph.replay()
        return known.logits

    def _graph(self, inputs: Tensor, attention: StepAttention) -> _Captured | None:
        state = attention.kernels.captured
        if state is None or self._refused:
            return None
        known = self._captured.get(state)
        if known is None:
            known = self._capture(inputs.to(self._device), attention)
        if known is not None:
            self._captured[state] = known
        return known

    def _capture(self, inputs: Tensor, attention: StepAttention) -> _Captured | None:
        """Entries written twice are the same entries, so the step that is captured may be run to warm up."""
        stream: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._forward(attention, *inputs)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._memory, stream=stream):
                logits = self._forward(attention, *inputs)
        except RuntimeError as error:
            self._refused = True
            _log.warning("decode runs without CUDA graphs: %s", str(error).splitlines()[0])
            return None
        self._memory = graph.pool()
        return _Captured(graph, inputs, logits)
