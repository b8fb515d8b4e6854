"""Decode steps as CUDA graphs: captured once a batch width, replayed under plans that change."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from tangram.kernels.transfer import placed
from tangram.model.attention import AttentionContext, StepAttention
from tangram.types import Int64

_log = logging.getLogger("tangram")

# Enters into tokens [T] those that only the device knows.
Carry = Callable[[Tensor], object]

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
        self._captured = WeakKeyDictionary[object, _Captured | None]()  # None: there was no memory for it
        self._memory: Any = None
        self._recent = deque[_Captured](maxlen=2)  # the device may still be at them when their buffers are let go
        self._refused = False

    def logits(self, tokens: Int64, positions: Int64, attention: StepAttention, carried: Carry) -> Tensor:
        """Logits [width, V] of a step that only decodes; they hold until the next one."""
        inputs = placed(np.stack([tokens, positions, np.arange(len(tokens))]), self._device)
        carried(inputs[0])
        known = self._graph(inputs, attention)
        if known is None:
            return self._forward(attention, *inputs)
        known.inputs.copy_(inputs)
        known.graph.replay()
        self._recent.append(known)
        return known.logits

    def _graph(self, inputs: Tensor, attention: StepAttention) -> _Captured | None:
        state = attention.kernels.captured
        if state is None or self._refused:
            return None
        if state not in self._captured:
            self._captured[state] = self._capture(inputs.clone(), attention)
        return self._captured[state]

    def _capture(self, inputs: Tensor, attention: StepAttention) -> _Captured | None:
        """Entries written twice are the same entries, so the step that is captured may be run to warm up."""
        stream: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._forward(attention, *inputs)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may ask the device for something meanwhile: only this one is held to what a graph can hold.
            with torch.cuda.graph(graph, pool=self._memory, stream=stream, capture_error_mode="thread_local"):
                logits = self._forward(attention, *inputs)
        except torch.OutOfMemoryError:
            _log.warning("a decode step of width %d runs without a CUDA graph: memory has run out", len(inputs[0]))
            return None
        except RuntimeError as error:
            self._refused = True
            _log.warning("decode runs without CUDA graphs: %s", str(error).splitlines()[0])
            return None
        self._memory = graph.pool()
        return _Captured(graph, inputs, logits)
