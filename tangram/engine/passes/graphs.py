"""Forward passes as CUDA graphs.

There is one for each `PassShape`. Passes that decode are replayed under changing plans, those of
single prefill rows at any length.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tangram.kernels.interface import PaddedShape, PassShape
from tangram.kernels.stopwatch import GraphBlocks
from tangram.model.attention import AttentionContext, StepAttention

_log = logging.getLogger("tangram")

# The attention of a pass, tokens [T], positions [T] and wanted places [n] → their logits [n, V].
Forward = Callable[[AttentionContext, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class _CapturedPass:
    """Every replay of `graph` reads `inputs` int64, writes `logits` and times `blocks`."""

    graph: Any
    inputs: Tensor
    logits: Tensor
    blocks: GraphBlocks


class PassGraphs:
    """Runs passes of one model by `forward`. Passes that no graph can hold run without one.

    The first pass of a shape runs without a graph, and is captured afterwards. So each device of
    several runs the model once for a pass, whichever of them captures it. The graph is replaced
    when the kernels have larger buffers for its shape: it has the addresses of those before.
    """

    def __init__(self, forward: Forward, device: torch.device) -> None:
        self._forward, self._device = forward, device
        # With the room of the buffers; None: there was no memory for it.
        self._captured: dict[PassShape, tuple[object, _CapturedPass | None]] = {}
        self._memory: Any = None
        # The device may still use them when their buffers are released.
        self._recent = deque[_CapturedPass](maxlen=16)
        self._refused = set[type[PassShape]]()

    @cached_property
    def _stream(self) -> Any:
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def forget(self) -> None:
        """Drop all graphs. Those that the device still runs end first."""
        self._captured.clear()
        self._recent.clear()

    def logits(self, inputs: Tensor, sizes: list[int], attention: StepAttention) -> Tensor:
        """Logits [wanted, V] of a pass that only decodes, or of a single padded row.

        They are valid until the next pass. `inputs` int64 are tokens, positions and wanted places
        of these `sizes`. Tokens and positions are padded as the pass's `PassShape` says. There are
        as many wanted places as any pass of the shape wants.
        """
        shape = attention.launch.shape
        if shape is None or shape.form in self._refused:
            return self._forward(attention, *torch.split(inputs, sizes))
        entry = self._captured.get(shape)
        if entry is None or entry[0] != shape.room:
            logits = self._forward(attention, *torch.split(inputs, sizes))
            graph = self._capture(inputs.clone(), sizes, attention, shape)
            self._captured[shape] = shape.room, graph
            return logits
        known = entry[1]
        if known is None:
            return self._forward(attention, *torch.split(inputs, sizes))
        known.inputs.copy_(inputs)
        known.graph.replay()
        attention.sealing.count_replay(known.blocks)
        self._recent.append(known)
        return known.logits

    def _capture(
        self, inputs: Tensor, sizes: list[int], attention: StepAttention, shape: PassShape
    ) -> _CapturedPass | None:
        parts = torch.split(inputs, sizes)
        try:
            graph = torch.cuda.CUDAGraph()
            # Other threads may use the device meanwhile: only this one is restricted during a
            # capture.
            with torch.cuda.graph(
                graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"
            ):
                logits = self._forward(attention, *parts)
        except torch.OutOfMemoryError:
            _log.warning(
                "a pass of %d tokens runs without a CUDA graph: memory has run out", sizes[0]
            )
            return None
        except RuntimeError as error:
            self._refused.add(shape.form)
            which = "prefill rows run" if issubclass(shape.form, PaddedShape) else "decode runs"
            _log.warning("%s without CUDA graphs: %s", which, str(error).splitlines()[0])
            return None
        finally:
            blocks = attention.sealing.take_blocks()
        self._memory = graph.pool()
        return _CapturedPass(graph, inputs, logits, blocks)
