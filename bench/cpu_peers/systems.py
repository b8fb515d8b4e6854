"""The systems of the comparison, each by name: its environment and its options."""

from __future__ import annotations

import os
import sys
from math import ceil
from pathlib import Path
from typing import Any

from bench.cpu_peers.cells import LONGEST, MOST_REQUESTS
from bench.cpu_peers.float32_file import write_float32
from bench.cpu_peers.system_process import BUILD, PeerSystem
from tangram.model.convert import convert_gguf
from tangram.model.source import EMBEDDED, gguf_file

OURS = Path(sys.executable)
VLLM_PYTHON = BUILD / "peers-vllm/bin/python"
LLAMA_PYTHON = BUILD / "peers-llama/bin/python"
KV_TOKEN_BYTES = 46_080  # of the embedded model, uncompressed, in float32
REFERENCE = "transformers"


def make_systems(threads: int, kv_tokens: int) -> dict[str, PeerSystem]:
    """Every system, in the order of its turns, with memory for `kv_tokens` tokens.

    Writes the weights in the forms that they read, where these are not there yet.
    """
    gguf = gguf_file(EMBEDDED)
    folder = str(convert_gguf(gguf))
    float32 = BUILD / f"{gguf.stem}.float32.gguf"
    if not float32.exists():
        BUILD.mkdir(exist_ok=True)
        write_float32(gguf, float32)
    gib = (kv_tokens + LONGEST) * KV_TOKEN_BYTES / 2**30
    return {
        **_tangram(threads, gib),
        REFERENCE: PeerSystem(
            "Transformers",
            "transformers_peer",
            OURS,
            {"model": folder, "dtype": "float32"},
            exact=True,
        ),
        "vllm": _vllm(threads, folder, ceil(gib)),
        "vllm-bfloat16": _vllm(threads, folder, ceil(gib), "bfloat16"),
        "llama-float32": _llama("llama.cpp, float32", threads, float32, exact=True),
        "llama-q4_1": _llama("llama.cpp, Q4_1", threads, gguf),
    }


def _tangram(threads: int, gib: float) -> dict[str, PeerSystem]:
    """The named variants of Tangram; add one here."""
    int4 = {"dtype": "bfloat16", "quantization": "int4"}
    whole = {"kv_retention": 1.0, "compile_decode": True}
    variants: dict[str, tuple[str, dict[str, Any], bool]] = {
        "tangram": ("Tangram, float32, ρ 0.5", {}, False),
        "tangram-full": ("Tangram, float32, ρ 1.0", {"kv_retention": 1.0}, True),
        "tangram-bfloat16": ("Tangram, bfloat16, ρ 0.5", {"dtype": "bfloat16"}, False),
        "tangram-int4": ("Tangram, int4, ρ 0.5", int4, False),
        "tangram-bfloat16-full": (
            "Tangram, bfloat16, ρ 1.0, compiled",
            {"dtype": "bfloat16"} | whole,
            False,
        ),
        "tangram-int4-full": ("Tangram, int4, ρ 1.0, compiled", int4 | whole, False),
    }
    shared = {"threads": threads, "kv_cache_gib": gib, "device": "cpu", "dtype": "float32"}
    return {
        name: PeerSystem(title, "tangram_peer", OURS, shared | own, exact)
        for name, (title, own, exact) in variants.items()
    }


def _vllm(threads: int, folder: str, gib: int, dtype: str = "float32") -> PeerSystem:
    """vLLM with the libraries preloaded that its page on CPUs asks for, where they are there."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    preloaded = [
        *VLLM_PYTHON.parents[1].glob("lib/libiomp5.so"),
        *Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"),
    ]
    return PeerSystem(
        f"vLLM, {dtype}",
        "vllm_peer",
        VLLM_PYTHON,
        {
            "model": folder,
            "dtype": dtype,
            "max_model_len": LONGEST,
            "max_num_seqs": MOST_REQUESTS,
            "enable_prefix_caching": True,
        },
        exact=dtype == "float32",
        variables={
            "VLLM_CPU_KVCACHE_SPACE": str(gib),
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "LD_PRELOAD": ":".join(map(str, preloaded)),
        },
    )


def _llama(title: str, threads: int, file: Path, *, exact: bool = False) -> PeerSystem:
    options = {
        "model": str(file),
        "threads": threads,
        "slots": MOST_REQUESTS,
        "most_tokens": LONGEST,
    }
    return PeerSystem(title, "llama_peer", LLAMA_PYTHON, options, exact=exact)
