"""An engine launches whatever its steps may launch before it serves: without a trace, and so that
nothing is left.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from bench.bare_tokenizer import load_tokenizer
from tests.gpu.test_engine import (
    BASE,
    CASES,
    CHUNK,
    PROMPTS,
    both,
    in_step,
    on_triton,
    options_of,
    submit_all,
)
from tests.gpu.test_engine import pytestmark as pytestmark
from tests.interpreter import interpreter_few
from tests.small_engines import profile_file, small_engine, tiny_model


@pytest.mark.parametrize(
    "case",
    interpreter_few(
        ["llama", "llama, second pass", "gpt-oss, windows and sinks", "gemma 2, softcap"],
        "gpt-oss, windows and sinks",
    ),
)
def test_a_rehearsal_leaves_no_trace(case: str, device: torch.device, tmp_path: Path) -> None:
    loaded = tiny_model(CASES[case][0], load_tokenizer("smollm2"), device)
    options = options_of(case, loaded, tmp_path)
    engines = both(loaded, options)
    for engine in engines:
        engine._runner.rehearse(50)
        engine._runner.passes.rehearse_decode(3)
        engine._runner.pool.zero_()
    in_step(engines, PROMPTS)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="nothing is compiled in the interpreter")
@pytest.mark.parametrize("head_dim, dtype", [(32, torch.float32), (64, torch.bfloat16)])
def test_nothing_is_compiled_once_an_engine_serves(
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Mixed steps, splits, shared prefixes, seals, gathered pasts: all of it was
    launched before.
    """
    from triton import knobs

    from tangram.kernels.triton import gathered

    monkeypatch.setattr(gathered, "LEAST_TOKENS", CHUNK)
    # A head dim that no other test has, so that no other test has compiled anything for it.
    loaded = tiny_model(
        LlamaConfig(**(BASE | {"head_dim": head_dim})), load_tokenizer("smollm2"), device, dtype
    )
    profile = profile_file(loaded, tmp_path, chunk_tokens=CHUNK)
    compiled: list[str] = []
    monkeypatch.setattr(
        knobs.runtime, "jit_post_compile_hook", lambda **about: compiled.append(about["repr"])
    )
    engine = small_engine(
        loaded,
        partial(on_triton, schedule="packing:naive+ctas=8+tile=16+min=16"),
        kv_retention=0.5,
        profile=(profile,),
        chunk_tokens=CHUNK,
        page_tokens=4,
        max_num_seqs=8,
        max_num_batched_tokens=50,
        max_model_len=100,
        kv_cache_gib=1e-3,
    )
    engine._runner.rehearse(50)
    engine._runner.passes.rehearse_decode(8)
    assert compiled, "the hook hears of kernels"
    compiled.clear()
    for prompts in (PROMPTS, [[*PROMPTS[2][:38], number] for number in range(3, 9)]):
        submit_all(engine, prompts)
        while engine.busy:
            engine.step()
    assert compiled == []
