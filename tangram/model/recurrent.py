"""Recurrent layers and short convolutions: the state of each row goes through them by itself.

Such a layer keeps a state of fixed size instead of KV entries. Transformers' mixers ask a cache for
the state before their tokens and give it the state behind them. In a pass of the engine
`PassStates` is this cache. By the purity law a whole chunk begins from the state at its start and
is computed alone, so the state at the end of a sealed chunk depends on the tokens alone.

CUDA graphs contain the addresses of states and of their places, so both stay where they are: a pass
writes its places into the buffer of its shape, and its graph reads them there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from inspect import unwrap
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from tangram.cache.step import Row, RowKind
from tangram.kernels.transfer import stage, upload
from tangram.model.mixer_kernels import choose_functions, fix_configs
from tangram.model.modules import derive, remake, replace_modules
from tangram.types import Int32, Int64, StateLoad

_CONV, _RECURRENT = "conv_states", "recurrent_states"  # as Transformers' cache layers name them
_GIVES = {"update_conv_state", "update_recurrent_state"}
_SEALED, _NEWEST = range(2)
# On a GPU so many tokens of a sequence at most go through a mixer in one call: the host launches
# some forty kernels for it.
JOINED_TOKENS = 4096
# Kernels of fla-core cut a call into parts of so many tokens: joined chunks are cut as alone.
MIXER_TOKENS = 64
_Made = TypeVar("_Made", Tensor, "tuple[Tensor, ...]")


@dataclass(frozen=True)
class StateName:
    """One state of a model: number `index` of the `kind` that `layer` has."""

    layer: int
    kind: str
    index: int = 0


@dataclass(frozen=True)
class StateShape:
    """The shape of one state of a sequence."""

    name: StateName
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """What it takes in memory."""
        return math.prod(self.shape) * self.dtype.itemsize


def _carries_state(kind: type[nn.Module]) -> bool:
    """Whether modules of `kind` themselves give a cache the state behind their tokens."""
    members = (member for base in kind.__mro__ for member in vars(base).values())
    codes = (getattr(unwrap(part), "__code__", None) for part in members if callable(part))
    return any(code is not None and not _GIVES.isdisjoint(code.co_names) for code in codes)


def has_states(model: nn.Module) -> bool:
    """Whether a part of `model` carries a state from token to token."""
    return any(_carries_state(type(part)) for part in model.modules())


def take_rows_apart(model: PreTrainedModel) -> None:
    """From now on each row of a pass goes through what carries states by itself."""

    @cache
    def by_row(kind: Any) -> type[nn.Module]:
        chosen = choose_functions(kind.forward, model.device)
        return derive(derive(kind, forward=chosen), RowByRow)

    replace_modules(
        model,
        lambda name, part: _carries_state(type(part)) and not isinstance(part, RowByRow),
        lambda name, part: remake(part, by_row),
    )
    if model.device.type != "cpu":
        fix_configs()


def count_state_bytes(shapes: Sequence[StateShape], slots: int) -> int:
    """Bytes of the states of up to `slots` sequences in a `StateMemory`."""
    return 2 * (slots + 1) * sum(shape.bytes for shape in shapes)


def read_state_shapes(model: PreTrainedModel, **options: Any) -> tuple[StateShape, ...]:
    """The states that a pass of two tokens leaves in Transformers' own cache; none without mixers.

    `options` are keyword arguments of the pass.
    """
    if not has_states(model):
        return ()
    held = DynamicCache(config=model.config)
    tokens = torch.tensor([[0, 1]], device=model.device)
    model(input_ids=tokens, position_ids=tokens, past_key_values=held, use_cache=True, **options)
    return tuple(
        StateShape(StateName(layer, kind, index), tuple(state.shape[1:]), state.dtype)
        for layer, part in enumerate(held.layers)
        if isinstance(part, LinearAttentionCacheLayerMixin)
        for kind in (_CONV, _RECURRENT)
        for index, state in getattr(part, kind).items()
        if state is not None
    )


def begin_rows(shapes: Sequence[StateShape], tokens: int, device: torch.device) -> PassStates:
    """The states of a pass of so many rows of one token, each of which begins a sequence."""
    memory = StateMemory(shapes, 1, torch.zeros(1, 4, device=device))
    begin = torch.tensor([0], device=device)
    return PassStates(memory, [_Part(slice(at, at + 1), begin, None, None) for at in range(tokens)])


def continue_row(
    shapes: Sequence[StateShape], counts: Sequence[int], device: torch.device
) -> PassStates:
    """The states of a pass of one sequence, cut into rows of `counts` tokens."""
    memory = StateMemory(shapes, 1, torch.zeros(1, 4, device=device))
    place = torch.tensor([0], device=device)
    ends = np.cumsum(counts).tolist()
    return PassStates(
        memory,
        [
            _Part(slice(end - count, end), place, place, None)
            for count, end in zip(counts, ends, strict=True)
        ],
    )


class StateMemory:
    """The states of up to `slots` sequences, and their snapshots in pages of `pool`.

    A sequence has two: that at the end of its newest sealed chunk, and that behind its newest
    token. One slot more is that of rows which pad a pass: they begin with zeros. A snapshot is the
    bytes of all states of `shapes`, one after the other. Consecutive chunks of a sequence are
    computed together up to `joined_tokens`.
    """

    def __init__(
        self, shapes: Sequence[StateShape], slots: int, pool: Tensor, joined_tokens: int = 0
    ) -> None:
        self._padding, self._slots, self._joined = slots, slots + 1, joined_tokens
        self._shapes, self._device = tuple(shapes), pool.device
        self._held = {
            state.name: torch.zeros(
                2 * self._slots, *state.shape, dtype=state.dtype, device=pool.device
            )
            for state in shapes
        }
        self._pages = pool.view(len(pool), -1).view(torch.uint8)
        self._places = dict[int, Tensor]()  # [2, rows], by rows

    def load(self, loads: Sequence[StateLoad]) -> None:
        """Sequences begin with the states of their snapshots, or with zeros."""
        sizes = [state.bytes for state in self._shapes]
        for load in loads:
            place = _SEALED * self._slots + load.slot
            if load.pages is None:
                for state in self._held.values():
                    state[place].zero_()
                continue
            whole = self._pages[upload(load.pages.astype(np.int64), self._device)].view(-1)
            parts = torch.split(whole[: sum(sizes)], sizes)
            for shape, part in zip(self._shapes, parts, strict=True):
                # A copy, because a part may begin at any byte.
                self._held[shape.name][place] = part.clone().view(shape.dtype).view(shape.shape)

    def of_pass(self, rows: Sequence[Row], width: int) -> PassStates:
        """The states of a pass of `rows`, whose tokens lie end to end: those that decode first.

        These are padded to `width` tokens. The states are valid until the next pass is begun.
        """
        decode = sum(row.kind is RowKind.DECODE for row in rows)
        slots = np.full(width + len(rows) - decode, self._padding)
        kinds = np.array([[_SEALED], [_NEWEST]]).repeat(len(slots), axis=1)
        at = [*range(decode), *range(width, len(slots))]
        slots[at] = [row.slot for row in rows]
        kinds[0, at] = [
            _NEWEST if row.start % row.retention.layout.chunk_tokens else _SEALED for row in rows
        ]
        kinds[1, at] = [_SEALED if row.kind is RowKind.SEAL else _NEWEST for row in rows]
        begin, end = self._place(kinds * self._slots + slots)
        parts = [_Part(slice(0, width), begin[:width], end[:width], None, decodes=True)]
        first = width
        for number, row in enumerate(rows[decode:], width):
            place, last = slice(number, number + 1), first + len(row.tokens)
            before = parts[-1]
            if number > width and self._joins(rows[decode + number - width - 1], row, before):
                whole = slice(before.tokens.start, last)
                parts[-1] = replace(before, tokens=whole, snapshot=row.snapshot)
            else:
                parts.append(_Part(slice(first, last), begin[place], end[place], row.snapshot))
            first = last
        return PassStates(self, parts if width else parts[1:])

    def _joins(self, before: Row, row: Row, part: _Part) -> bool:
        """Whether `row` goes on behind `before`, which ends `part`, in the same call of a mixer."""
        tokens = part.tokens.stop - part.tokens.start + len(row.tokens)
        follows = row.slot == before.slot and before.kind is row.kind is RowKind.SEAL
        return follows and before.snapshot is None and tokens <= self._joined

    def of_repetition(self, row: Row, tokens: int) -> PassStates:
        """The states of a pass that goes on behind the chunk of `row` and leaves nothing."""
        place = upload(np.array([_SEALED * self._slots + row.slot]), self._device)
        return PassStates(self, [_Part(slice(0, tokens), place, None, None)])

    def _place(self, places: Int64) -> Tensor:
        """`places` [2, rows] on the device, always in the same buffer for so many rows."""
        rows = places.shape[1]
        if rows not in self._places:
            self._places[rows] = torch.empty(2, rows, dtype=torch.int64, device=self._device)
        return self._places[rows].copy_(stage(places, self._device), non_blocking=True)

    def read(self, name: StateName, places: Tensor) -> Tensor:
        """Copies [n, …] of the states at `places` int64 [n]."""
        return self._held[name].index_select(0, places)

    def read_all(self, places: Tensor) -> dict[StateName, Tensor]:
        """Copies of all states at `places`, by name."""
        return {state.name: self.read(state.name, places) for state in self._shapes}

    def write(self, name: StateName, places: Tensor, states: Tensor) -> None:
        """Replace the states at `places` int64 [n] by `states` [n, …]."""
        self._held[name].index_copy_(0, places, states)

    def save(self, states: Mapping[StateName, Tensor], pages: Int32) -> None:
        """Write `states`, each [1, …], into the `pages` int32 [n] of a snapshot."""
        parts = [
            states[shape.name].contiguous().view(-1).view(torch.uint8) for shape in self._shapes
        ]
        whole = self._pages.new_zeros(len(pages), self._pages.shape[1])
        torch.cat(parts, out=whole.view(-1)[: sum(map(len, parts))])
        self._pages[upload(pages.astype(np.int64), self._device)] = whole


@dataclass(frozen=True, eq=False)
class _Part:
    """Tokens of a pass that go through a mixer in one call: all rows that decode, or another row
    and those of its sequence behind it.

    Their states `begin` and `end` at places of a `StateMemory`, or are kept nowhere. `snapshot`
    int32 [n] are the pages of the state at the end.
    """

    tokens: slice
    begin: Tensor
    end: Tensor | None
    snapshot: Int32 | None
    decodes: bool = False


# Not frozen: PyTorch 2.11 compiles layers for the values in a frozen argument.
@dataclass(eq=False)
class PassStates:
    """Plays Transformers' cache for one pass, whose tokens lie in `parts`."""

    memory: StateMemory
    parts: Sequence[_Part]
    _snapshots: dict[int, dict[StateName, Tensor]] = field(default_factory=dict)

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, **options: Any
    ) -> tuple[Tensor, ...]:
        """What attention reads: the keys and values of the pass. Its context has those before."""
        return key, value

    def compute(self, mixer: Callable[[Tensor, RowStates], _Made], hidden: Tensor) -> _Made:
        """`mixer` over `hidden` [1, T, hidden], part by part: [1, T, …], or several of these."""
        found = list[tuple[Tensor, ...]]()
        for number, part in enumerate(self.parts):
            given, states = hidden[:, part.tokens], RowStates(self.memory, part.begin)
            made = mixer(given.transpose(0, 1) if part.decodes else given, states)
            outs = made if isinstance(made, tuple) else (made,)
            found.append(tuple(out.transpose(0, 1) for out in outs) if part.decodes else outs)
            if part.end is not None:
                for name, state in states.held.items():
                    self.memory.write(name, part.end, state)
            if part.snapshot is not None and len(self.parts) > 1:
                self._snapshots.setdefault(number, {}).update(states.held)
        whole = tuple(torch.cat(parts, dim=1) for parts in zip(*found, strict=True))
        return whole if isinstance(made, tuple) else whole[0]

    def save(self) -> None:
        """Write the snapshots of the pass, after all layers.

        That of a row alone is still in memory, where a graph has left it, too.
        """
        for number, part in enumerate(self.parts):
            if part.snapshot is not None and part.end is not None:
                states = self._snapshots.get(number) or self.memory.read_all(part.end)
                self.memory.save(states, part.snapshot)


@dataclass(frozen=True, eq=False)
class RowStates:
    """Plays Transformers' cache for one call of a mixer, whose rows begin at `places` int64 [n].

    `held` are the states behind their tokens.
    """

    memory: StateMemory
    places: Tensor
    held: dict[StateName, Tensor] = field(default_factory=dict)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        """The inputs of a convolution before the tokens. A mixer may change it in place."""
        return self._find(StateName(layer_idx, _CONV, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        """The state before the tokens."""
        return self._find(StateName(layer_idx, _RECURRENT, state_idx))

    def update_conv_state(
        self, inputs: Tensor, layer_idx: int, state_idx: int = 0, **options: Any
    ) -> Tensor:
        """`inputs` [n, …, T] behind those before; the newest of them are the state."""
        name = StateName(layer_idx, _CONV, state_idx)
        before = self._find(name)
        whole = torch.cat([before, inputs.to(before.dtype)], dim=-1)
        self.held[name] = whole[..., whole.shape[-1] - before.shape[-1] :]
        return whole

    def update_recurrent_state(
        self, state: Tensor, layer_idx: int, state_idx: int = 0, **options: Any
    ) -> Tensor:
        """`state` is that behind the tokens."""
        name = StateName(layer_idx, _RECURRENT, state_idx)
        self.held[name] = state.to(self._find(name).dtype)
        return self.held[name]

    def has_previous_state(self, layer_idx: int, state_idx: int = 0) -> bool:
        """True: a sequence begins with zeros."""
        return True

    def is_recording_past(self, layer_idx: int) -> bool:
        """False: a state cannot go back."""
        return False

    def _find(self, name: StateName) -> Tensor:
        if name not in self.held:
            self.held[name] = self.memory.read(name, self.places)
        return self.held[name]


class RowByRow:
    """Comes before the class of a mixer, whose rows go through it one by one in a `PassStates`.

    No compiler looks into it: it would compile for the rows of each pass.
    """

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        """The mixer over `hidden_states` [1, T, hidden], with the cache among its `options`."""
        whole: Callable[..., Any] = super().forward  # type: ignore[misc]
        given = [value for value in (*args, *options.values()) if isinstance(value, PassStates)]
        if not given:
            return whole(hidden_states, *args, **options)

        def mix(hidden: Tensor, states: RowStates) -> Any:
            positional = [states if value is given[0] else value for value in args]
            named = {
                name: states if value is given[0] else value for name, value in options.items()
            }
            return whole(hidden, *positional, **named)

        return given[0].compute(mix, hidden_states)
