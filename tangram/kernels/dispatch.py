"""Choose the kernels and the host memory of a pool by its device, once."""

from __future__ import annotations

from torch import Tensor

from tangram.kernels.cpu.compiled_attention import runs_compiled
from tangram.kernels.cpu.cpu_kernels import CpuKernels
from tangram.kernels.interface import KvPool, PoolKernels
from tangram.kernels.offload.host_forms import HostForm
from tangram.kernels.offload.host_memory import HostMemory, LinkWriter, PlainHostMemory
from tangram.kernels.reference_kernels import ReferenceKernels
from tangram.plan.schedule import Schedule


def pool_kernels(pool: KvPool) -> PoolKernels:
    """The fastest kernels for `pool`.

    Compiles the kernels that are known before the first step.
    """
    if pool.entries.is_cuda:
        # Triton comes with torch where there is a GPU.
        from tangram.kernels.triton.triton_kernels import TritonKernels

        return TritonKernels(pool)
    return host_kernels(pool)


def host_kernels(pool: KvPool, schedule: Schedule | None = None) -> PoolKernels:
    """The fastest kernels for a `pool` in host memory. `schedule` None is their own."""
    return (CpuKernels if runs_compiled(pool.entries) else ReferenceKernels)(pool, schedule)


def host_memory(
    pool: Tensor, pages: int, form: HostForm | None = None, writer: LinkWriter | None = None
) -> HostMemory:
    """`pages` host pages in `form` behind `pool` [N_pages, Hp, S, P, D]; 0 take no memory.

    `writer` takes the links that go to disk; a GPU has none.
    """
    if pool.is_cuda and pages:
        from tangram.kernels.offload.gpu_host_memory import GpuHostMemory

        return GpuHostMemory(pool, pages, form)
    return PlainHostMemory(pool, pages, form, writer)
