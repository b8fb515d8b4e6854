"""Forward passes as CUDA graphs.

Decode passes are captured once for each batch width and replayed under changing plans. Passes of
single prefill rows are captured once for each `PaddedShape`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
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

    A graph is kept as long as the kernels' object that it was captured with.
    """

    def __init__(self, forward: Forward, device: torch.device) -> None:
        self._forward, self._device = forward, device
        self._captured = WeakKeyDictionary[
            object, _CapturedPass | None
        ]()  # None: there was no memory for it
        self._memory: Any = None
        # The device may still use them when their buffers are released.
        self._recent = deque[_CapturedPass](maxlen=16)
        self._refused = set[bool]()  # by whether such passes are padded
        self._frozen = False

    def freeze(self) -> None:
        """Capture no more: a pass without a graph runs without one.

        A capture runs the model once more, so on several devices all must capture, or none.
        """
        self._frozen = True

    def logits(self, inputs: Tensor, sizes: list[int], attention: StepAttention) -> Tensor:
        """Logits [wanted, V] of a pass that only decodes, or of a single padded row.

        They are valid until the next pass. `inputs` int64 are tokens, positions and wanted places
        of these `sizes`. Tokens and positions are padded to the width or the `PaddedShape`. There
        are as many wanted places as any such pass wants.
        """
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
        if state is None or (attention.padded_tokens is not None) in self._refused:
            return None
        if state not in self._captured:
            if self._frozen:
                return None
            self._captured[state] = self._capture(inputs.clone(), sizes, attention)
        return self._captured[state]

    def _capture(
        self, inputs: Tensor, sizes: list[int], attention: StepAttention
    ) -> _CapturedPass | None:
        """Capture a pass.

        The pass may also run to warm up, since it writes the same entries again.
        """
        parts = torch.split(inputs, sizes)
        stream: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._forward(attention, *parts)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may use the device meanwhile: only this one is restricted during a
            # capture.
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
            self._refused.add(attention.padded_tokens is not None)
            which = "decode runs" if attention.padded_tokens is None else "prefill rows run"
            _log.warning("%s without CUDA graphs: %s", which, str(error).splitlines()[0])
            return None
        finally:
            blocks = attention.sealing.take_blocks()
        self._memory = graph.pool()
        return _CapturedPass(graph, inputs, logits, blocks)
