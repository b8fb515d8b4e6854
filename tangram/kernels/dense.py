"""Whole chunks of a sequence that drops nothing: their past is gathered, and torch's flash attention does the rest.

Heads of one length need no pages to be followed tile by tile; where a chunk is long enough to fill the device by
itself, copying its past once is cheap beside what it saves.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

LEAST_TOKENS = 1024  # of a chunk; shorter ones leave multiprocessors idle
MOST_DIMENSIONS = 256  # that flash attention knows
DTYPES = (torch.float16, torch.bfloat16)


@triton.jit
def gather_entries(
    k, v, pool, tables, address, gathered, past, total, stride_k, stride_k_head, stride_v, stride_v_head,
    H: tl.constexpr, D: tl.constexpr, HP: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write `gathered` [2, H, total, D]: the first `past` entries from pages, the others from k, v [C, H, D].

    `address` [H, 3]: table offset, column, past length; grid (ceil(total / BLOCK), H).
    """
    head = tl.program_id(1)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    real = (d < D)[None, :]
    old = (n < past)[:, None] & real
    new = ((n >= past) & (n < total))[:, None] & real
    page = tl.load(tables + tl.load(address + head * 3) + n // P, mask=n < past, other=0).to(tl.int64)
    entry = (page * HP + tl.load(address + head * 3 + 1)) * (2 * P * D) + (n % P) * D
    place = pool + entry[:, None] + d[None, :]
    own = (n - past).to(tl.int64)[:, None]
    target = gathered + (head.to(tl.int64) * total + n)[:, None] * D + d[None, :]
    keys = tl.load(k + own * stride_k + head * stride_k_head + d[None, :], mask=new, other=0.0)
    tl.store(target, tl.where(old, tl.load(place, mask=old, other=0.0), keys), mask=old | new)
    values = tl.load(v + own * stride_v + head * stride_v_head + d[None, :], mask=new, other=0.0)
    target += H * total.to(tl.int64) * D
    tl.store(target, tl.where(old, tl.load(place + P * D, mask=old, other=0.0), values), mask=old | new)


def serves(q: Tensor, pool: Tensor) -> bool:
    """Whether flash attention takes these dtypes and dimensions; q [T, Q, D]."""
    return q.dtype in DTYPES and pool.dtype == q.dtype and q.shape[2] <= MOST_DIMENSIONS


def room(heads: int, total: int, dim: int) -> int:
    """Elements that the keys and values of `total` entries take."""
    return 2 * heads * total * dim


def attend(
    q: Tensor, k: Tensor, v: Tensor, pool: Tensor, tables: Tensor, address: Tensor, gathered: Tensor, *, past: int,
    scaling: float,
) -> Tensor:  # fmt: skip
    """One chunk against its `past` entries a head and causally against itself: q [C, Q, D], k, v [C, H, D] → [C, Q, D].

    `address` int32 [H, 3]: table offset, column and past length, the same for all heads. `gathered` has `room` for
    past and chunk, and is overwritten.
    """
    (tokens, heads, dim), total = k.shape, past + len(k)
    keys, values = k.transpose(0, 1), v.transpose(0, 1)
    if past:
        gathered = gathered[: room(heads, total, dim)].view(2, heads, total, dim)
        gather_entries[(triton.cdiv(total, 64), heads)](
            k, v, pool, tables, address, gathered, past, total, *k.stride()[:2], *v.stride()[:2], H=heads, D=dim,
            HP=pool.shape[1], P=pool.shape[3], BLOCK=64, BLOCK_D=triton.next_power_of_2(dim), num_warps=4,
        )  # fmt: skip
        keys, values = gathered
    out = scaled_dot_product_attention(
        q.transpose(0, 1)[None], keys[None], values[None], attn_mask=causal_lower_right(tokens, total), scale=scaling,
        enable_gqa=True,
    )  # fmt: skip
    return out[0].transpose(0, 1)
