"""What vLLM loads at its start, in each of its processes."""

from __future__ import annotations


def register() -> None:
    """Register the backend and the manager of its blocks.

    With `TANGRAM_VLLM` the backend replaces those that vLLM chooses on a CPU, which ignores
    `--attention-backend`, and refuses what these alone serve. On a GPU it is called `CUSTOM`.
    """
    from torch.nn.modules.module import register_module_module_registration_hook
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    from tangram_vllm.options import is_wanted
    from tangram_vllm.slab_manager import SlabManager
    from tangram_vllm.spec import SlabSpec
    from tangram_vllm.surroundings import introduce

    KVCacheSpecRegistry._ensure_registered()  # else vLLM would never register its own
    KVCacheSpecRegistry.register(SlabSpec, SlabManager, SlabSpec)
    ours = "tangram_vllm.backend.TangramBackend"
    register_backend(AttentionBackendEnum.CUSTOM, ours)
    if is_wanted():
        register_module_module_registration_hook(introduce)
        for backend in ("CPU_ATTN", "CPU_MLA", "AMX_MLA"):
            register_backend(AttentionBackendEnum[backend], ours)
