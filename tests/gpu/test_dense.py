"""Dense attention of a whole chunk is the specification's: its past from pages, then itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tangram.kernels import reference

HEADS, GROUP, DIM, PAGE = 3, 2, 64, 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "past"), [(40, 0), (64, 128), (100, 60), (16, 200)])
def test_a_chunk_sees_its_past_and_itself(tokens: int, past: int, dtype: torch.dtype, device: torch.device) -> None:
    from tangram.kernels import dense

    torch.manual_seed(tokens)
    batch = torch.randn(tokens + 9, HEADS * GROUP + 2 * HEADS, DIM).to(dtype)[4:-5]  # as it lies in a flattened batch
    q, k, v = batch.split([HEADS * GROUP, HEADS, HEADS], dim=1)
    pages = -(-past // PAGE) + 1
    pool = torch.randn(HEADS * pages, 2, 2, PAGE, DIM).to(dtype)
    tables = torch.randperm(HEADS * pages).int()
    address = np.array([[head * pages, head % 2, past] for head in range(HEADS)])
    expected = reference.prefill(q, k, v, pool, tables, *address.T, scaling=DIM**-0.5, past_tokens=past)
    there = [x.to(device) for x in (q, k, v, pool, tables)]
    if device.type == "cuda" and not dense.serves(*there[:4]):
        pytest.skip(f"no fused attention for {dtype} on this GPU")
    out = torch.full((tokens, HEADS * GROUP, DIM), torch.nan, dtype=dtype, device=device)
    dense.attend(
        *there, torch.from_numpy(address).to(device, torch.int32),
        torch.full((dense.room(HEADS, 400, DIM),), torch.nan, dtype=dtype, device=device), out, past=past,
        scaling=DIM**-0.5,
    )  # fmt: skip
    limit = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(out.cpu().float(), expected.float(), rtol=limit, atol=limit)
