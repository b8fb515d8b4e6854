"""The fastest configuration of each kernel of fla-core on this GPU, for `model/mixer_kernels.py`.

`python -m bench.mixer_configs` lets Triton time them all, for the heads of Qwen3-Next, Kimi Linear
and Granite 4 Small, in bfloat16: a chunk alone, and chunks of a sequence together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tangram.model.mixer_kernels import find_tuners
from tangram.model.recurrent import JOINED_TOKENS

CHUNK, HEAD_DIM, HEADS = 512, 128, 32


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Random numbers on the GPU."""
    return torch.randn(1, *shape, device="cuda", dtype=dtype)


@torch.inference_mode()
def compute(tokens: int) -> None:
    """Both delta rules and Mamba-2 over so many tokens of a sequence."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.kda import chunk_kda
    from fla.ops.simple_gla import chunk_simple_gla

    state = draw(HEADS, HEAD_DIM, HEAD_DIM, dtype=torch.float32)
    values, gain = draw(tokens, HEADS, HEAD_DIM), draw(tokens, HEADS).sigmoid()
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    for rule, heads, decays in (
        (chunk_gated_delta_rule, HEADS // 2, (HEADS,)),
        (chunk_kda, HEADS, (HEADS, HEAD_DIM)),
    ):
        keys = draw(tokens, heads, HEAD_DIM)
        decay = -draw(tokens, *decays, dtype=torch.float32).abs()
        rule(keys, keys, values, g=decay, beta=gain, initial_state=state, **options)
    keys, values = draw(tokens, 4 * HEADS, HEAD_DIM), draw(tokens, 4 * HEADS, HEAD_DIM // 2)
    decay = -draw(tokens, 4 * HEADS, dtype=torch.float32).abs()
    chunk_simple_gla(keys, keys, values, g=decay, output_final_state=True, state_v_first=True)


def main() -> None:
    """Print what was chosen, by kernel and by what it was chosen for."""
    for tokens in (CHUNK, JOINED_TOKENS):
        compute(tokens)
    chosen = {
        f"{name} {key}: {config}"
        for name, tuner in find_tuners()
        for key, config in tuner.cache.items()
    }
    print("\n".join(sorted(chosen)))


if __name__ == "__main__":
    main()
