"""KeyDiff's scores on the GPU in two launches (Triton).

`compress/scorers/keydiff.py` is the specification.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 64
_PARTS = 16


@triton.jit
def _load_keys(
    keys,
    stride_chunk,
    stride_head,
    stride_token,
    c,
    d,
    C: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
):
    """The keys of tokens `c` of this program's chunk and head in float32, and their norms."""
    chunk, head = (tl.program_id(0) // H).to(tl.int64), (tl.program_id(0) % H).to(tl.int64)
    place = (
        keys
        + chunk * stride_chunk
        + head * stride_head
        + c.to(tl.int64)[:, None] * stride_token
        + d[None, :]
    )
    key = tl.load(place, mask=(c < C)[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
    return key, tl.sqrt(tl.sum(key * key, 1))


@triton.jit
def sum_directions(
    keys,
    sums,
    stride_chunk,
    stride_head,
    stride_token,
    C: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Sums [N · H, blocks, D] of each block's normalised keys; grid (N · H, blocks)."""
    d = tl.arange(0, BLOCK_D)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    key, norm = _load_keys(keys, stride_chunk, stride_head, stride_token, c, d, C, D, H)
    total = tl.sum(key / tl.maximum(norm, 1e-12)[:, None], 0)
    tl.store(
        sums + (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * D + d, total, mask=d < D
    )


@triton.jit
def compare_keys(
    keys,
    sums,
    scores,
    stride_chunk,
    stride_head,
    stride_token,
    blocks,
    C: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Scores [N · H, C] from the sums of `blocks` blocks, added in order; grid (N · H, blocks)."""
    d = tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, blocks, PARTS):
        part = first + tl.arange(0, PARTS)
        place = sums + (tl.program_id(0) * blocks + part)[:, None] * D + d[None, :]
        total += tl.sum(
            tl.load(place, mask=(part < blocks)[:, None] & (d < D)[None, :], other=0.0), 0
        )
    anchor = total / C
    length = tl.maximum(tl.sqrt(tl.sum(anchor * anchor, 0)), 1e-8)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    key, norm = _load_keys(keys, stride_chunk, stride_head, stride_token, c, d, C, D, H)
    cosine = tl.sum(key * anchor[None, :], 1) / (tl.maximum(norm, 1e-8) * length)
    tl.store(scores + tl.program_id(0) * C + c, -cosine, mask=c < C)


def score(keys: Tensor) -> Tensor:
    """Minus the cosine between each key and its chunk's mean direction.

    keys [N, H, C, D], with any strides of chunks, heads and tokens → float32 [N, H, C]. Sums are in
    float32, in an order that depends on C alone.
    """
    chunks, heads, tokens, dim = keys.shape
    grid = chunks * heads, triton.cdiv(tokens, _BLOCK)
    sums = torch.empty(*grid, dim, dtype=torch.float32, device=keys.device)
    scores = torch.empty(keys.shape[:3], dtype=torch.float32, device=keys.device)
    sizes = {
        "C": tokens,
        "D": dim,
        "H": heads,
        "BLOCK": _BLOCK,
        "BLOCK_D": triton.next_power_of_2(dim),
    }
    sum_directions[grid](keys, sums, *keys.stride()[:3], **sizes)
    compare_keys[grid](keys, sums, scores, *keys.stride()[:3], grid[1], PARTS=_PARTS, **sizes)
    return scores
