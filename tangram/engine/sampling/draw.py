"""Draw a token for each random row: an exponential race among the tokens.

Token i gets a number e[i] from the exponential distribution, hashed from the row's key and i alone.
The token with the largest weight[i] / e[i] wins, with probability weight[i] / sum (the Gumbel-max
trick; Maddison et al. 2014, arXiv 1411.0030, section 2). The last bit of a logit changes the result
only if the two best are that close. Inverting the cumulative sum instead would move every later
token's range with each weight.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from tangram.kernels.transfer import upload

# Of rows x vocabulary on a GPU, 64 MiB a tensor; a CPU keeps one row in its cache.
_ENTRIES_AT_ONCE = 2**24
_INCREMENT = -0x61C88647  # 2**32 / the golden ratio, as int32
# Xor-shift and product, each twice (lowbias32 of C. Wellons' hash-prospector): shift right, then
# multiply.
_ROUND = ((16, 0x7FEB352D), (15, -0x7B935975))


def row_key(seed: int, sample_index: int, step: int) -> int:
    """The key of a row: an int64 that depends on the arguments alone."""
    digest = hashlib.blake2b(struct.pack("<3q", seed, sample_index, step), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def draw(weights: Tensor, keys: Sequence[int]) -> Tensor:
    """[R] int64: for each row of `weights` [R, V] token i with probability weights[i] / sum.

    `weights` are int64. `keys` are those of the rows. A token of weight 0 is never drawn while
    another weighs more. A token of less than 2**-32 of the sum is almost never drawn.
    """
    places = upload(keys, weights.device)
    rows = max(1, _ENTRIES_AT_ONCE // weights.shape[1]) if weights.is_cuda else 1
    pairs = zip(torch.split(weights, rows), torch.split(places, rows), strict=True)
    return torch.cat(
        [part.float().div_(exponentials(key, part.shape[1])).argmax(dim=-1) for part, key in pairs]
    )


def exponentials(keys: Tensor, count: int) -> Tensor:
    """[R, count] float32 from the exponential distribution of mean 1, for `keys` int64 [R]."""
    halves = keys.view(torch.int32).view(-1, 2)
    numbers = (
        torch.arange(1, count + 1, dtype=torch.int32, device=keys.device).mul_(_INCREMENT)[None]
        + halves[:, :1]
    )
    shifted = torch.empty_like(numbers)
    _mix(numbers, shifted)
    _mix(numbers.add_(halves[:, 1:]), shifted)
    # 31 bits and a half: uniform in (0, 1), exact for small numbers, since the smallest number
    # wins.
    return _shift(numbers, 1, shifted).float().add_(0.5).mul_(-(2.0**-31)).log1p_().neg_()


def _mix(numbers: Tensor, shifted: Tensor) -> None:
    for shift, factor in _ROUND:
        numbers.bitwise_xor_(_shift(numbers, shift, shifted)).mul_(factor)
    numbers.bitwise_xor_(_shift(numbers, 16, shifted))


def _shift(numbers: Tensor, count: int, out: Tensor) -> Tensor:
    """Shift right, filled with zeros: torch has no unsigned shift."""
    torch.bitwise_right_shift(numbers, count, out=out)
    return out.bitwise_and_((1 << (32 - count)) - 1)
