"""The scores of Fast KVzip's gate on the GPU in one launch (Triton).

`compress/scorers/gate.py` is the specification. Torch needs some twenty launches a layer, and for
a small model these take as long as computing the chunk.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

_TOKENS = 32  # of a program
_INNER = 64  # elements of the hidden state in one product


@triton.jit
def _project(
    hidden,
    weight,
    t,
    d,
    stride_token,
    T,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    INNER: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`hidden` [T, WIDTH] of tokens `t` times the transposed rows `d` of `weight` [D, WIDTH]."""
    total = tl.zeros([TOKENS, BLOCK_D], tl.float32)
    for first in range(0, WIDTH, INNER):
        i = first + tl.arange(0, INNER)
        x = tl.load(
            hidden + t.to(tl.int64)[:, None] * stride_token + i[None, :],
            mask=(t < T)[:, None] & (i < WIDTH)[None, :],
            other=0.0,
        ).to(tl.float32)
        w = tl.load(
            weight + d[None, :] * WIDTH + i[:, None],
            mask=(d < D)[None, :] & (i < WIDTH)[:, None],
            other=0.0,
        )
        total = tl.dot(x, w, total, input_precision=PRECISION)
    return total


@triton.jit
def _normalize(x, weight, d, D: tl.constexpr, EPSILON: tl.constexpr):
    """RMS norm of the rows of `x`; elements behind D are 0."""
    scale = tl.rsqrt(tl.sum(x * x, 1) / D + EPSILON)
    return x * scale[:, None] * tl.load(weight + d, mask=d < D, other=0.0)[None, :]


@triton.jit(do_not_specialize=["T", "C"])
def score_tokens(
    hidden,
    query_weight,
    query_bias,
    key_weight,
    query_norm,
    key_norm,
    learned_keys,
    bias,
    scores,
    T,
    C,
    stride_token,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    S: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    INNER: tl.constexpr,
    EPSILON: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Scores [T / C, H, C] of `hidden` [T, WIDTH]; grid (blocks of tokens, H)."""
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    s = tl.arange(0, BLOCK_S)
    factor = 1.0 / tl.sqrt(D * 1.0)
    key = _project(
        *(hidden, key_weight + head * D * WIDTH, t, d, stride_token, T),
        *(D, WIDTH, TOKENS, BLOCK_D, INNER, PRECISION),
    )
    key = _normalize(key, key_norm, d, D, EPSILON)
    learned = tl.load(
        learned_keys + (head * S + s)[None, :] * D + d[:, None],
        mask=(s < S)[None, :] & (d < D)[:, None],
        other=0.0,
    )
    total = tl.zeros([TOKENS], tl.float32)
    for number in range(G):
        place = head * G + number
        query = _project(
            *(hidden, query_weight + place * D * WIDTH, t, d, stride_token, T),
            *(D, WIDTH, TOKENS, BLOCK_D, INNER, PRECISION),
        )
        query += tl.load(query_bias + place * D + d, mask=d < D, other=0.0)[None, :]
        query = _normalize(query, query_norm, d, D, EPSILON)
        logit = tl.sum(query * key, 1) * factor + tl.load(bias + place)
        others = tl.dot(query, learned, input_precision="ieee") * factor
        others = tl.where((s < S)[None, :], others, float("-inf"))
        most = tl.max(others, 1)
        log_sum = most + tl.log(tl.sum(tl.exp(others - most[:, None]), 1))
        total += tl.sigmoid(logit - log_sum)
    chunk = (t // C).to(tl.int64)
    tl.store(scores + (chunk * H + head) * C + t % C, total / G, mask=t < T)


def score(weights: Mapping[str, Tensor], hidden: Tensor, chunks: int, epsilon: float) -> Tensor:
    """The gate of one layer over the tokens of N chunks: float32 [N, H, C] in (0, 1).

    `hidden` [N · C, hidden] are the inputs of the attention module; `weights` are the float32
    tensors of the layer by their names in a gate file, `epsilon` that of its norms. A token's score
    depends on its own row.

    Products are in TF32, which holds bfloat16 and the float16 of a gate file exactly, and of a
    model in float32 in float32.
    """
    heads, _, sinks, dim = weights["k_base"].shape
    tokens, width = hidden.shape
    scores = torch.empty(chunks, heads, tokens // chunks, dtype=torch.float32, device=hidden.device)
    score_tokens[(triton.cdiv(tokens, _TOKENS), heads)](
        *(hidden, weights["q_proj.weight"], weights["q_proj.bias"], weights["k_proj.weight"]),
        *(weights["q_norm.weight"], weights["k_norm.weight"], weights["k_base"], weights["b"]),
        *(scores, tokens, tokens // chunks, hidden.stride(0)),
        **{"H": heads, "G": weights["b"].shape[2], "D": dim, "S": sinks, "WIDTH": width},
        TOKENS=_TOKENS,
        BLOCK_D=max(16, triton.next_power_of_2(dim)),
        BLOCK_S=max(16, triton.next_power_of_2(sinks)),
        INNER=_INNER,
        EPSILON=epsilon,
        PRECISION="ieee" if hidden.dtype == torch.float32 else "tf32",
        num_warps=4,
    )
    return scores
