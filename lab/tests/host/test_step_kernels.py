"""Kernels of a step by kinds, as the tables of docs/serving.md have them."""

from __future__ import annotations

import pytest

from bench.serving.timeline import describe, kind_of, split_busy, sum_busy_us

# FlashAttention's kernels are named after CUTLASS, too.
NAMES = {
    "void cutlass::device_kernel<flash::FlashAttnFwdSm90>": "attention",
    "void vllm::reshape_and_cache_flash_kernel": "cache",
    "merge_splits": "attention",
    "_ZN7cutlass13device_kernelI_gemm6kernel13GemmUniversal_10underscoreE": "products",
    "compare_keys": "cache",
    "nvjet_sm90_tst_256x8": "products",
    "Memcpy HtoD (Pinned -> Device)": "copies",
    "triton_red_fused__to_copy_mean": "other",
}


@pytest.mark.parametrize(("name", "kind"), NAMES.items())
def test_a_kernel_is_of_the_kind_that_its_name_says(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_what_overlaps_is_busy_once_and_only_the_difference_counts() -> None:
    less = [("nvjet", 0.0, 2.0)]
    more = [("nvjet", 0.0, 2.0), ("decode_tasks", 3.0, 6.0), ("merge_segments", 5.0, 8.0)]
    assert sum_busy_us(more) == 7.0
    step = describe(more, less, 1, [0.01])
    assert step["busy_ms"] == pytest.approx(0.005)
    assert step["launches"] == 2
    assert split_busy(step)["attention"] == pytest.approx(0.005)
    assert split_busy(step)["products"] == 0
