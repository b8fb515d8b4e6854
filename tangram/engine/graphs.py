"""Passes as CUDA graphs: of decode, captured once a batch width and replayed under plans that
change, and of single prefill rows, captured once a room.
"""

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

from tangram.kernels.stopwatch import GraphBlocks
from tangram.kernels.transfer import place
from tangram.model.attention import AttentionContext, StepAttention
from tangram.types import Int64

_log = logging.getLogger("tangram")

# Enters into tokens [T] those that only the device knows.
Carry = Callable[[Tensor], object]

# The attention of a pass, tokens [T], positions [T] and the places [n] of those wanted → their
# logits [n, V].
Forward = Callable[[AttentionContext, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class _CapturedPass:
    """`inputs` int64 is read by every replay of `graph`, which writes `logits` and
    times `blocks`.
    """

    graph: Any
    inputs: Tensor
    logits: Tensor
    blocks: GraphBlocks


class PassGraphs:
    """Runs passes of one model by `forward`. What a model does that no graph can hold is run as it
    is.

    A graph is kept as long as what the kernels say it was captured with.
    """

    def __init__(self, forward: Forward, device: torch.device) -> None:
        self._forward, self._device = forward, device
        self._captured = WeakKeyDictionary[
            object, _CapturedPass | None
        ]()  # None: there was no memory for it
        self._memory: Any = None
        # The device may still be at them when their buffers are let go
        self._recent = deque[_CapturedPass](maxlen=16)
        self._refused = set[bool]()  # whether such passes have a room

    def logits(
        self,
        tokens: Int64,
        positions: Int64,
        wanted: Int64,
        attention: StepAttention,
        carried: Carry,
    ) -> Tensor:
        """Logits [wanted, V] of a pass that only decodes, or of a single row with room; they hold
        until the next one.

        `tokens` and `positions` are padded to the width or the room, `wanted` are as many as any
        such pass wants.
        """
        sizes = [len(tokens), len(positions), len(wanted)]
        inputs = place(np.concatenate([tokens, positions, wanted]), self._device)
        carried(inputs[: len(tokens)])
        known = self._graph(inputs, sizes, attention)
        if known is None:
            return self._forward(attention, *torch.split(inputs, sizes))
        known.inputs.copy_(inputs)
        known.graph.replay()
        attention.sealing.count_replay(known.blocks)
        self._recent.append(known)
        return known.logits

    def _graph(
        self, inputs: Tensor, sizes: list[int], attention: StepAttention
    ) -> _CapturedPass | None:
        state = attention.kernels.captured
        if state is None or (attention.room is not None) in self._refused:
            return None
        if state not in self._captured:
            self._captured[state] = self._capture(inputs.clone(), sizes, attention)
        return self._captured[state]

    def _capture(
        self, inputs: Tensor, sizes: list[int], attention: StepAttention
    ) -> _CapturedPass | None:
        """Entries written twice are the same entries, so the pass that is captured may be run to
        warm up.
        """
        parts = torch.split(inputs, sizes)
        stream: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._forward(attention, *parts)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may ask the device for something meanwhile: only this one is held to
            # what a graph can hold.
            with torch.cuda.graph(
                graph, pool=self._memory, stream=stream, capture_error_mode="thread_local"
            ):
                logits = self._forward(attention, *parts)
        except torch.OutOfMemoryError:
            _log.warning(
                "a pass of %d tokens runs without a CUDA graph: memory has run out", sizes[0]
            )
            return None
        except RuntimeError as error:
            self._refused.add(attention.room is not None)
            which = "decode runs" if attention.room is None else "prefill rows run"
            _log.warning("%s without CUDA graphs: %s", which, str(error).splitlines()[0])
            return None
        finally:
            blocks = attention.sealing.take_blocks()
        self._memory = graph.pool()
        return _CapturedPass(graph, inputs, logits, blocks)
