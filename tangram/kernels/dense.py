"""Whole chunks of a sequence that drops nothing: their past is gathered, and torch's fused attention does the rest.

Heads of one length need no pages to be followed tile by tile; where a chunk is long enough to fill the device by
itself, copying its past once is cheap beside what it saves. Past and chunk are attended to one by one and joined by
their log-sum-exp: cuDNN, torch's fastest attention on Hopper, has no causal mask for a chunk that comes late.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention

LEAST_TOKENS = 2048  # of a chunk; the kernel that follows pages is as fast for shorter ones (H200)
_aten = torch.ops.aten


@triton.jit(do_not_specialize_on_alignment=["tables", "address"])
def gather_entries(
    pool, tables, address, gathered, past,
    H: tl.constexpr, D: tl.constexpr, HP: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write `gathered` [2, H, past, D]: keys and values of the first `past` entries of each head, from its pages.

    `address` [H, 3]: table offset, column, past length; grid (ceil(past / BLOCK), H).
    """
    head = tl.program_id(1)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    here = (n < past)[:, None] & (d < D)[None, :]
    page = tl.load(tables + tl.load(address + head * 3) + n // P, mask=n < past, other=0).to(tl.int64)
    entry = (page * HP + tl.load(address + head * 3 + 1)) * (2 * P * D) + (n % P) * D
    place = pool + entry[:, None] + d[None, :]
    target = gathered + (head.to(tl.int64) * past + n)[:, None] * D + d[None, :]
    tl.store(target, tl.load(place, mask=here, other=0.0), mask=here)
    tl.store(target + H * past.to(tl.int64) * D, tl.load(place + P * D, mask=here, other=0.0), mask=here)


@triton.jit
def join_parts(
    first, second, first_lse, second_lse, out, tokens, stride_first, stride_first_head, stride_second,
    stride_second_head, stride_out, stride_out_head, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One attention of two parts [C, Q, D], each with its natural log-sum-exp [Q, C]; grid (ceil(C / BLOCK), Q)."""
    head = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    here = (c < tokens)[:, None] & (d < D)[None, :]
    one = tl.load(first_lse + head * tokens + c, mask=c < tokens, other=0.0)
    other = tl.load(second_lse + head * tokens + c, mask=c < tokens, other=0.0)
    share = tl.sigmoid(one - other)[:, None]
    row = c.to(tl.int64)[:, None]
    x = tl.load(first + row * stride_first + head * stride_first_head + d[None, :], mask=here, other=0.0)
    y = tl.load(second + row * stride_second + head * stride_second_head + d[None, :], mask=here, other=0.0)
    joined = x.to(tl.float32) * share + y.to(tl.float32) * (1.0 - share)
    place = out + row * stride_out + head * stride_out_head + d[None, :]
    tl.store(place, joined.to(out.dtype.element_ty), mask=here)


def serves(q: Tensor, k: Tensor, v: Tensor, pool: Tensor) -> bool:
    """Whether there is fused attention for such q [T, Q, D], k and v [T, H, D], stored as they are."""
    if pool.dtype != k.dtype or not q.is_cuda:
        return False
    query, key, value = (x.transpose(0, 1)[None] for x in (q, k, v))
    return can_use_cudnn_attention(SDPAParams(query, key, value, None, 0.0, True, True))


def room(heads: int, past: int, dim: int) -> int:
    """Elements that the keys and values of `past` entries take."""
    return 2 * heads * past * dim


def attend(
    q: Tensor, k: Tensor, v: Tensor, pool: Tensor, tables: Tensor, address: Tensor, gathered: Tensor, out: Tensor, *,
    past: int, scaling: float,
) -> None:  # fmt: skip
    """One chunk against its `past` entries a head and causally against itself: q [C, Q, D], k, v [C, H, D] → out.

    `address` int32 [H, 3]: table offset, column and past length, the same for all heads. `gathered` has `room` for
    the past, and is overwritten.
    """
    (tokens, heads, dim), block_dim = k.shape, triton.next_power_of_2(k.shape[2])
    own, own_lse = _part(q, k.transpose(0, 1), v.transpose(0, 1), causal=True, scaling=scaling)
    if not past:
        out.copy_(own)
        return
    gathered = gathered[: room(heads, past, dim)].view(2, heads, past, dim)
    gather_entries[(triton.cdiv(past, 64), heads)](
        pool, tables, address, gathered, past, H=heads, D=dim, HP=pool.shape[1], P=pool.shape[3], BLOCK=64,
        BLOCK_D=block_dim, num_warps=4,
    )  # fmt: skip
    before, before_lse = _part(q, *gathered, causal=False, scaling=scaling)
    join_parts[(triton.cdiv(tokens, 32), q.shape[1])](
        before, own, before_lse, own_lse, out, tokens, *before.stride()[:2], *own.stride()[:2], *out.stride()[:2],
        D=dim, BLOCK=32, BLOCK_D=block_dim, num_warps=4,
    )  # fmt: skip


def _part(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scaling: float) -> tuple[Tensor, Tensor]:
    """q [C, Q, D] against k, v [H, N, D]: [C, Q, D] and the natural log-sum-exp float32 [Q, C]."""
    rows = q.transpose(0, 1)[None], k[None], v[None]
    if q.is_cuda:
        out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(*rows, None, True, 0.0, causal, scale=scaling)
    else:
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(*rows, 0.0, causal, scale=scaling)
    return out[0].transpose(0, 1), lse.reshape(q.shape[1], q.shape[0]).contiguous()
