"""Prefill over a pool of latents: they are expanded, and torch's own attention does the rest.

A latent has the width of several heads, so to attend to it costs more than to expand it once for
the hundreds of queries of a chunk. With torch's kernels keys, values and queries have one width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tangram.kernels.interface import MOST_BYTES
from tangram.kernels.reference import Part, gather, merge_parts
from tangram.kernels.transfer import place
from tangram.types import Int32

TOGETHER = (torch.float16, torch.bfloat16)  # dtypes in which torch attends rows of any lengths
# Latents [n, D] → the keys [Q, n, D'] and values [Q, n, V] of the query heads.
Expand = Callable[[Tensor], tuple[Tensor, Tensor]]
EXPANDED_BYTES = MOST_BYTES // 4  # of keys and values at a time: the model and torch copy them


def prefill(
    q: Tensor,
    latents: Tensor,
    pool: Tensor,
    tables: Tensor,
    address: Sequence[int],
    *,
    expand: Expand,
    scaling: float,
) -> Tensor:
    """Attention of n new tokens: q [n, Q, D'] → [n, Q, V] in q's dtype.

    `latents` [m, D] of m ≥ n new tokens are not yet in the pool, and the queries belong to the last
    n of them. `address` is table offset, column and length of the past, all of which is seen. It is
    expanded in parts of at most `EXPANDED_BYTES`. The result depends on this request alone.
    """
    table, column, length = address
    queries, lead = q.transpose(0, 1), len(latents) - len(q)
    keys, values = expand(latents)
    entry_bytes = (keys[:, 0].numel() + values[:, 0].numel()) * q.element_size()
    step = max(1, EXPANDED_BYTES // entry_bytes)
    parts = [_attend(queries, keys[:, lead:], values[:, lead:], scaling, causal=True)]
    if lead:
        parts.append(_attend(queries, keys[:, :lead], values[:, :lead], scaling))
    for begin, end in pairwise([*range(0, length, step), length]):
        past, _ = gather(pool, tables, table, column, begin, end)
        parts.append(_attend(queries, *expand(past.to(q.dtype)), scaling))
    return merge_parts(parts)[0].to(q.dtype).transpose(0, 1)


@dataclass(frozen=True, eq=False)
class Rows:
    """N prefill rows whose queries, and whose new latents, lie end to end, and their pasts.

    `spans` int32 [N, 4] are the queries [begin, end) and latents [begin, end) of each, from 0 on;
    `address` int32 [N, 3] table offset, column and length of its past. Rows of one sequence that
    are neighbours read the same past, each up to its own length, which ascends.
    """

    spans: Int32
    address: Int32

    @property
    def sequences(self) -> Iterator[slice]:
        """Runs of neighbours that read the same past."""
        table, _, length = self.address.T
        apart = np.flatnonzero((np.diff(table) != 0) | (np.diff(length) < 0)) + 1
        for begin, end in pairwise([0, *apart.tolist(), len(table)]):
            yield slice(begin, end)


def lie_together(spans: Int32) -> bool:
    """Whether rows of `spans` [N, 4] lie end to end, each with one query for each new latent."""
    whole = spans[:, 1] - spans[:, 0] == spans[:, 3] - spans[:, 2]
    return bool(whole.all() and (spans[1:, [0, 2]] == spans[:-1, [1, 3]]).all())


def prefill_together(
    q: Tensor,
    latents: Tensor,
    pool: Tensor,
    tables: Tensor,
    rows: Rows,
    *,
    expand: Expand,
    scaling: float,
) -> Tensor:
    """`prefill` of many `rows` at once: q [T, Q, D'] → [T, Q, V] in q's dtype.

    All their latents [M, D] are expanded by one product. The past of a sequence is expanded once
    for all of its rows, and each part of it is attended by those rows that see some of it.
    """
    starts, key_starts = (
        np.append(rows.spans[:, side], rows.spans[-1, side + 1]) for side in (0, 2)
    )
    keys, values = expand(latents)
    entry_bytes = (keys[:, 0].numel() + values[:, 0].numel()) * q.element_size()
    step = max(1, EXPANDED_BYTES // entry_bytes)
    out, lse = _attend_rows(q, keys, values, starts, key_starts, None, scaling)
    for own in rows.sequences:
        table, column, longest = rows.address[own][-1].tolist()
        lengths = rows.address[own, 2]
        for begin, end in pairwise([*range(0, longest, step), longest]):
            past, _ = gather(pool, tables, table, column, begin, end)
            seeing = own.start + int(np.searchsorted(lengths, begin, "right"))
            asking = starts[seeing : own.stop + 1]
            seen = np.minimum(rows.address[seeing : own.stop, 2], end) - begin
            where = slice(*asking[[0, -1]].tolist())
            parts = [
                (out[where], lse[where]),
                _attend_rows(
                    q[where],
                    *expand(past.to(q.dtype)),
                    asking - asking[0],
                    np.zeros_like(asking),
                    seen,
                    scaling,
                ),
            ]
            out[where], lse[where] = merge_parts(parts)
    return out.to(q.dtype)


def _attend_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Int32,
    key_starts: Int32,
    seen: Int32 | None,
    scaling: float,
) -> Part:
    """Attention of rows of queries q [T, Q, D] over k [Q, m, D] and v [Q, m, V]: out [T, Q, V].

    Row r has the queries `starts[r]` to `starts[r + 1]`. It sees `seen[r]` keys from
    `key_starts[r]` on, or without `seen`, causally, those up to `key_starts[r + 1]`.
    """
    if not q.is_cuda:
        stops = key_starts[1:] if seen is None else key_starts[:-1] + seen
        parts = [
            _attend(
                q[begin:end].transpose(0, 1),
                k[:, first:last],
                v[:, first:last],
                scaling,
                causal=seen is None,
            )
            for (begin, end), first, last in zip(
                pairwise(starts.tolist()), key_starts.tolist(), stops.tolist(), strict=False
            )
        ]
        out, lse = (torch.cat(side, 1).transpose(0, 1) for side in zip(*parts, strict=True))
        return out, lse
    width = max(q.shape[-1], v.shape[-1])
    padded = [
        x if x.shape[-1] == width else functional.pad(x, (0, width - x.shape[-1]))
        for x in (q, k.transpose(0, 1), v.transpose(0, 1))
    ]
    used = np.diff(key_starts) if seen is None else seen
    at = place(np.concatenate([starts, key_starts, used]).astype(np.int32), q.device)
    of_queries, of_keys, lengths = torch.split(at, [len(starts), len(key_starts), len(used)])
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *padded,
        of_queries,
        of_keys,
        int(np.diff(starts).max()),
        int(used.max()),
        0.0,
        seen is None,
        False,
        scale=scaling,
        seqused_k=lengths,
    )
    return out[..., : v.shape[-1]].float(), lse.transpose(0, 1)


def _attend(q: Tensor, k: Tensor, v: Tensor, scaling: float, *, causal: bool = False) -> Part:
    """Attention of q [Q, n, D] over k [Q, m, D] and v [Q, m, V] by torch, as a mergeable part."""
    width = max(q.shape[-1], v.shape[-1])
    padded = [
        (x if x.shape[-1] == width else functional.pad(x, (0, width - x.shape[-1])))[None]
        for x in (q, k, v)
    ]
    aten = torch.ops.aten
    if q.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            *padded, 0.0, causal, scale=scaling
        )
    elif q.element_size() == 2:
        out, lse, *_ = aten._scaled_dot_product_flash_attention(*padded, 0.0, causal, scale=scaling)
    else:
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(
            *padded, None, True, 0.0, causal, scale=scaling
        )
    return out[0, ..., : v.shape[-1]].float(), lse[0, :, : q.shape[1]].float()
