"""Forward passes as CUDA graphs.

Decode passes are captured once for each batch width and replayed under changing plans. Passes of
single prefill rows are captured once for each `PaddedShape`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

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
    several runs the model once for a pass, whichever of them captures it. A graph is kept as long
    as the kernels' object that it was captured with, which may serve passes of several sizes.
    """

    def __init__(self, forward: Forward, device: torch.device) -> None:
        self._forward, self._device = forward, device
        # By sizes, of each kernels' object; None: there was no memory for it.
        self._captured = WeakKeyDictionary[object, dict[tuple[int, ...], _CapturedPass | None]]()
        self._memory: Any = None
        # The device may still use them when their buffers are released.
        self._recent = deque[_CapturedPass](maxlen=16)
        self._refused = set[bool]()  # by whether such passes are padded

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
        of these `sizes`. Tokens and positions are padded to the width or the `PaddedShape`. There
        are as many wanted places as any such pass wants.
        """
        state = attention.launch.captured
        if state is None or (attention.launch.padded_tokens is not None) in self._refused:
            return self._forward(attention, *torch.split(inputs, sizes))
        captured, key = self._captured.setdefault(state, {}), tuple(sizes)
        if key not in captured:
            logits = self._forward(attention, *torch.split(inputs, sizes))
            captured[key] = self._capture(inputs.clone(), sizes, attention)
            return logits
        known = captured[key]
        if known is None:
            return self._forward(attention, *torch.split(inputs, sizes))
        known.inputs.copy_(inputs)
        known.graph.replay()
        attention.sealing.count_replay(known.blocks)
        self._recent.append(known)
        return known.logits

    def _capture(
        self, inputs: Tensor, sizes: list[int], attention: StepAttention
    ) -> _CapturedPass | None:
        parts = torch.split(inputs, sizes)
        graph = torch.cuda.CUDAGraph()
        try:
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
            self._refused.add(attention.launch.padded_tokens is not None)
            which = "decode runs" if attention.launch.padded_tokens is None else "prefill rows run"
            _log.warning("%s without CUDA graphs: %s", which, str(error).splitlines()[0])
            return None
        finally:
            blocks = attention.sealing.take_blocks()
        self._memory = graph.pool()
        return _CapturedPass(graph, inputs, logits, blocks)
