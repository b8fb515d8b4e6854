"""A forward pass as a value: rows, tokens, positions, addresses, and the chunks that end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
from torch import Tensor

from tangram.cache.step import Row, RowKind, Step
from tangram.kernels.interface import PassAddresses
from tangram.model.sealing import Seal
from tangram.types import Int32, Int64


@dataclass(frozen=True, eq=False)
class Pass:
    """One run of the model: what it computes, as numbers on the host.

    DECODE `rows` come first. `tokens` and `positions` int64 [T] are the flattened batch, in which
    those of the decode rows are padded to the width of `addresses`. `ends` [R] are the places of
    each row's last token. `wanted` [n] are the places of the tokens whose logits are: those whose
    successors are chosen (all tokens of a DECODE row, and the last token of each other row that
    samples), and then those before the `targets` of rows. `seals` are the chunks that end. Nothing
    changes a pass: it has copies of what the cache changes.
    """

    rows: tuple[Row, ...]
    tokens: Int64
    positions: Int64
    ends: Int64
    wanted: Int64
    addresses: PassAddresses
    seals: tuple[Seal, ...]

    @property
    def prefill_rows(self) -> tuple[Row, ...]:
        """Its SEAL and TAIL rows."""
        decode = self.addresses.decode
        return self.rows if decode is None else self.rows[len(decode.counts) :]

    @property
    def sealed_tokens(self) -> list[slice]:
        """The tokens of each SEAL row in the flattened batch."""
        spans = self.addresses.prefill.spans
        return [
            slice(int(span["query_begin"]), int(span["query_end"]))
            for row, span in zip(self.prefill_rows, spans, strict=True)
            if row.kind is RowKind.SEAL
        ]

    def followed_by(self, growth: Int32) -> Pass:
        """The pass behind this one, which decodes one token of each row.

        Where `growth` [R] is 0 instead of 1, it repeats this one. Its tokens are 0: only the device
        knows them.
        """
        lengths, positions = self.addresses.lengths.copy(), self.positions.copy()
        lengths[[row.slot for row in self.rows]] += growth[:, None]
        positions[: len(growth)] += growth
        return replace(
            self,
            tokens=np.zeros_like(self.tokens),
            positions=positions,
            addresses=replace(self.addresses, lengths=lengths),
        )

    def repeating(self, number: int, tokens: Int64) -> Pass:
        """KVzip's second pass: prefill row `number` goes on with `tokens`, of which none stays."""
        row = self.prefill_rows[number]
        repeated = self.addresses.prefill.repeat_row(number, len(tokens))
        return Pass(
            (row,),
            tokens,
            row.start + len(row.tokens) + np.arange(len(tokens)),
            np.array([len(tokens) - 1]),
            np.zeros(0, np.int64),
            PassAddresses(self.addresses.lengths, None, repeated),
            (),
        )


@dataclass(frozen=True, eq=False)
class PlannedStep:
    """`step` and its `passes`. `drafted` int64 [drafts] are its drafts; None if it has none."""

    step: Step
    passes: tuple[Pass, ...]
    drafted: Tensor | None = None


def seals_of(rows: Sequence[Row]) -> tuple[Seal, ...]:
    """The seals of prefill `rows`; consecutive chunks of one retention are one."""
    return tuple(
        Seal(group[0], tuple(rows[at] for at in group))
        for (retention, kind), found in groupby(
            range(len(rows)), lambda at: (rows[at].retention, rows[at].kind)
        )
        if kind is RowKind.SEAL and retention.scorer is not None and (group := list(found))
    )


def flatten(rows: Sequence[Row], decode_rows: int, width: int) -> tuple[Int64, Int64, Int64, Int64]:
    """The `tokens`, `positions`, `ends` and `wanted` of the pass of `rows`.

    The first `decode_rows` decode, and are padded to `width` tokens.
    """
    tokens = [row.tokens for row in rows]
    counts = np.array([len(part) for part in tokens])
    ends = np.cumsum(counts) - 1
    decoded = int(counts[:decode_rows].sum())
    fill = np.zeros(width - decoded, np.int64)
    # A token's place in the batch, moved to where its row starts.
    places = np.arange(counts.sum())
    places += np.repeat([row.start for row in rows] - (ends + 1 - counts), counts)
    ends[decode_rows:] += len(fill)
    tokens.insert(decode_rows, fill)
    sampled = [
        end for row, end in zip(rows[decode_rows:], ends[decode_rows:], strict=True) if row.sample
    ]
    scored = [
        np.arange(len(row.targets)) + (end + 1 - count)
        for row, end, count in zip(
            rows[decode_rows:], ends[decode_rows:], counts[decode_rows:], strict=True
        )
        if row.targets is not None
    ]
    return (
        np.concatenate(tokens),
        np.concatenate([places[:decoded], fill, places[decoded:]]),
        ends,
        np.concatenate([np.arange(decoded), np.asarray(sampled, np.int64), *scored]),
    )
