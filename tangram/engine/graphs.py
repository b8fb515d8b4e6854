"""Decode steps as CUDA graphs: captured once a batch width, replayed under plans that change."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
    """`inputs` int64 [3, width] is read by every replay of `graph`, which writes `logits`; `state` must be the same."""

    graph: Any
    inputs: Tensor
    logits: Tensor
    state: object


class DecodeGraphs:
    """Runs decode passes of one model by `forward`. What a model does that no graph can hold is run as it is."""

    def __init__(self, forward: Forward, device: torch.device) -> None:
        self._forward, self._device = forward, device
        self._captured: dict[int, _Captured] = {}
        self._memory: Any = None
        self._refused = False

    def logits(self, tokens: Int64, positions: Int64, attention: StepAttention) -> Tensor:
        """Logits [width, V] of a step that only decodes; they hold until the next one."""
        width, state = len(tokens), attention.kernels.captured
        new = torch.from_numpy(tokens), torch.from_numpy(positions), torch.arange(width)
        inputs = staged(torch.stack(new).numpy(), self._device)
        known = self._captured.get(width)
        if state is not None and not self._refused and (known is None or known.state is not state):
            known = self._capture(inputs, attention, state)
        if known is None or known.state is not state:
            return self._forward(attention, *inputs.to(self._device, non_blocking=True))
        known.inputs.copy_(inputs, non_blocking=True)
        known.graph.replay()
        return known.logits

    def _capture(self, inputs: Tensor, attention: StepAttention, state: object) -> _Captured | None:
        """Entries written twice are the same entries, so the step that is captured may be run to warm up."""
        own = inputs.to(self._device)
        self._captured.pop(len(own[0]), None)
        stream: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._forward(attention, *own)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._memory, stream=stream):
                logits = self._forward(attention, *own)
        except RuntimeError as error:
            self._refused = True
            _log.warning("decode runs without CUDA graphs: %s", str(error).splitlines()[0])
            return None
        self._memory = graph.pool()
        captured = self._captured[len(own[0])] = _Captured(graph, own, logits, state)
        return captured
