"""What engines launch on each card, compiled for it on a CPU.

`python -m tests.gpu.compiled_launches short FILE 86 90`, or `… long FILE 86 90`. A tiny engine
rehearses with its real launchers. Triton's hook takes down what it would compile, and nothing is
run; then Triton and its ptxas compile it. In a process of its own, where the interpreter is off.
"""

from __future__ import annotations

import io
import json
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import DeepseekV3Config, Gemma2Config, GptOssConfig, LlamaConfig, PretrainedConfig
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from bench.bare_tokenizer import load_tokenizer
from tangram.compress.scorers.gate import NORM_EPSILON, GateShape
from tangram.kernels.offload.host_memory import words
from tangram.kernels.triton import gate, gathered, page_copies
from tangram.kernels.triton.card import Card
from tangram.kernels.triton.triton_kernels import SERVED, TritonKernels
from tangram_lab.baselines.compared_schedules import parse_schedule
from tests.gpu.cards import CARDS
from tests.small_engines import LATENT, profile_file, small_engine, tiny_model

CHUNK = 64
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 20}
FAMILIES: dict[str, Any] = {
    "plain": (LlamaConfig, {}),
    "windows and sinks": (
        GptOssConfig,
        {**SLIDING, "num_local_experts": 2, "num_experts_per_tok": 1, "rope_parameters": None},
    ),
    "windows and softcap": (
        Gemma2Config,
        {**SLIDING, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0},
    ),
    "latents": (
        DeepseekV3Config,
        LATENT | {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64},
    ),
}


@dataclass(frozen=True)
class Variant:
    """A model and a cache: what launches depend on."""

    head_dim: int
    dtype: str = "bfloat16"
    fp8: bool = False
    group: int = 4
    family: str = "plain"
    schedule: str | None = None
    drafts: int = 0

    def config(self) -> PretrainedConfig:
        """Two groups of query heads; those of latents are one."""
        made, own = FAMILIES[self.family]
        latent = self.family == "latents"
        heads = self.group if latent else 2 * self.group
        fields: dict[str, Any] = {
            "vocab_size": 96,
            "hidden_size": 16 * self.group,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_key_value_heads": heads if latent else 2,
            "num_attention_heads": heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": 512,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        return made(**(fields | own))


# Of each card, together every family, and shapes that come near its limits.
SHORT = {
    80: [Variant(128, fp8=True, group=4)],
    86: [Variant(256, family="windows and softcap", group=2)],
    89: [Variant(128, "float16", fp8=True, group=1)],
    90: [Variant(64, family="windows and sinks", group=8)],
    100: [Variant(64, group=7), Variant(576, family="latents", group=20)],
    120: [Variant(128, "float16", group=3, drafts=3)],
}
# Heads of GLM-4.7-Flash, DeepSeek-V2-Lite and DeepSeek-V3.
LATENTS = [
    Variant(576, family="latents", fp8=fp8, group=group)
    for group in (20, 16, 128)
    for fp8 in (False, True)
]
LONG = [
    *(
        Variant(dim, dtype, fp8, group)
        for (dim, group) in ((64, 8), (80, 1), (96, 3), (128, 4), (256, 2))
        for dtype in ("bfloat16", "float16")
        for fp8 in (False, True)
    ),
    *(
        Variant(dim, family=family, fp8=fp8, group=group)
        for family in list(FAMILIES)[1:]
        for dim, group in ((64, 8), (128, 5), (256, 2))
        for fp8 in (False, True)
    ),
    *(Variant(dim, schedule="packing:naive") for dim in (64, 128, 256)),
    *(Variant(dim, "float32", fp8) for dim in (64, 128) for fp8 in (False, True)),
    *(Variant(dim, fp8=fp8, drafts=7) for dim in (64, 128, 256) for fp8 in (False, True)),
    Variant(64, group=8, family="windows and sinks", drafts=15),
    *LATENTS,
    Variant(576, family="latents", group=16, drafts=3),
]


ATTENTION = (
    "decode_tasks",
    "merge_segments",
    "prefill_tiles",
    "attend_segments",
    "attend_expanded",
)


class Absent:
    """Triton's driver of a card that is not here."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._target.arch

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass
class RecordedLaunch:
    """One specialisation of a kernel, as Triton writes it down."""

    kernel: Any
    name: str
    data: str


@dataclass(frozen=True)
class Compiled:
    """What Triton and ptxas say of a kernel; `spilled_bytes` of one thread."""

    card: int
    kernel: str
    head_dim: int
    dtype: str
    variant: str
    shared_bytes: int
    registers: int
    warps: int
    spilled_bytes: int


def record_launches(capability: int, variant: Variant, folder: Path) -> list[RecordedLaunch]:
    """What an engine of `variant` launches on that card in its rehearsal."""
    driver.set_active(Absent(capability))
    found: dict[tuple[str, str], RecordedLaunch] = {}

    def note(**about: Any) -> bool:
        name, data = about["fn"].name, about["compile"]["specialization_data"]
        found.setdefault((name, data), RecordedLaunch(about["fn"].jit_function, name, data))
        return True  # do not compile

    knobs.runtime.jit_cache_hook = note
    try:
        _rehearse(CARDS[capability], variant, folder)
    finally:
        knobs.runtime.jit_cache_hook = None
    return list(found.values())


def _rehearse(card: Card, variant: Variant, folder: Path) -> None:
    cpu, tokenizer = torch.device("cpu"), load_tokenizer("smollm2")
    schedule = parse_schedule(variant.schedule) if variant.schedule else SERVED
    loaded = tiny_model(variant.config(), tokenizer, cpu, getattr(torch, variant.dtype))
    profile = profile_file(loaded, folder, chunk_tokens=CHUNK)
    drafts = {"method": "ngram", "num_speculative_tokens": variant.drafts}
    engine = small_engine(
        loaded,
        lambda pool: TritonKernels(pool, schedule, card),
        kv_retention=0.5,
        profile=(profile,),
        chunk_tokens=CHUNK,
        page_tokens=16,
        max_num_seqs=8,
        max_num_batched_tokens=140,
        max_model_len=300,
        kv_cache_gib=2e-2,
        kv_cache_dtype="fp8" if variant.fp8 else "auto",
        speculative_config=drafts if variant.drafts else None,
    )
    runner = engine._runner
    runner.rehearse(140)
    runner.passes.rehearse_decode(8)
    pool, place = words(runner.pool), torch.zeros(1, dtype=torch.int32)
    page_copies.copy(pool, place, torch.empty_like(pool[:1]), place, programs=1)
    _score_by_gate(variant)


def _score_by_gate(variant: Variant) -> None:
    """The gate of a layer of the variant's heads, as the embedded model's is trained."""
    shape = GateShape(1, 576, 2, variant.group, min(variant.head_dim, 128), sinks=16)
    weights = {name: torch.zeros(size) for name, size in shape.tensor_shapes().items()}
    hidden = torch.zeros(CHUNK, shape.hidden, dtype=getattr(torch, variant.dtype))
    gate.score(weights, hidden, 1, NORM_EPSILON)


def compile_launch(capability: int, variant: Variant, launch: RecordedLaunch) -> Compiled:
    """Compile one launch; Triton's errors pass."""
    driver.set_active(Absent(capability))
    log = io.StringIO()
    with redirect_stdout(log):
        kernel = launch.kernel.preload(launch.data)
    told = log.getvalue()
    registers, spilled = (
        int(found[1]) if (found := re.search(pattern, told)) else -1
        for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill stores")
    )
    return Compiled(
        capability,
        launch.name.rpartition(".")[2],
        variant.head_dim,
        variant.dtype,
        str(variant),
        kernel.metadata.shared,
        registers,
        kernel.metadata.num_warps,
        spilled,
    )


def short(folder: Path, cards: Iterable[int]) -> Iterator[tuple[int, Variant, RecordedLaunch]]:
    """Attention for each of `cards`, another of its launches every time; other kernels for the
    first that launches them.
    """
    seen: set[str] = set()
    for number, capability in enumerate(cards):
        recorded = [  # before any is compiled: what is compiled would be launched
            (variant, record_launches(capability, variant, folder)) for variant in SHORT[capability]
        ]
        for variant, found in recorded:
            launches: dict[str, list[RecordedLaunch]] = {}
            for launch in found:
                launches.setdefault(launch.name, []).append(launch)
            for name, own in launches.items():
                if name.endswith(ATTENTION) or name not in seen:
                    # The last launches are those of the most drafts.
                    yield capability, variant, own[-1 if variant.drafts else number % len(own)]
            seen |= launches.keys()


def long(folder: Path, cards: Iterable[int]) -> Iterator[tuple[int, Variant, RecordedLaunch]]:
    """All launches of all variants for `cards`, each once."""
    for capability in cards:
        found: dict[tuple[str, str], tuple[int, Variant, RecordedLaunch]] = {}
        for variant in LONG:  # before any is compiled: what is compiled would be launched
            for launch in record_launches(capability, variant, folder):
                found.setdefault((launch.name, launch.data), (capability, variant, launch))
        yield from found.values()


def main(form: str, target: str, *cards: str) -> None:
    """Write a line of JSON for each kernel and card to `target`."""
    gathered.LEAST_TOKENS = CHUNK
    knobs.nvidia.dump_ptxas_log = True
    with tempfile.TemporaryDirectory() as folder, Path(target).open("w") as file:
        choose = {"short": short, "long": long}[form]
        for capability, variant, launch in choose(Path(folder), map(int, cards)):
            line = asdict(compile_launch(capability, variant, launch))
            file.write(json.dumps(line) + "\n")
            file.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
