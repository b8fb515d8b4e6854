"""Engines for the tests: models, profiles, and vLLM in a process of its own."""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tangram.compress.library import find_shipped_profiles
from tangram.compress.profile import (
    Calibration,
    ModelFingerprint,
    Profile,
    ProfileOptions,
    ScorerSpec,
)
from tangram.compress.scorers import default_scope, make_scorer, takes_gate
from tangram.compress.scorers.gate import Gate, GateShape, save_gate

CHUNK = 64  # of the tiny model
SHIPPED = "smollm2.keydiff.model.c512.r0.5.json"
Request = dict[str, Any]


@dataclass(frozen=True)
class EngineOutcome:
    """What an engine did: answers by round, vLLM's counters, blocks, and its log."""

    rounds: list[list[dict[str, Any]]]
    counters: dict[str, float]
    blocks: int
    free: int
    log: str

    def tokens(self, number: int = 0) -> list[list[list[int]]]:
        return [answer["tokens"] for answer in self.rounds[number]]

    def cached_tokens(self, number: int) -> list[int]:
        return [answer["cached"] for answer in self.rounds[number]]


def environment(options: dict[str, Any] | None) -> dict[str, str]:
    """The variables of a process of vLLM, with the plugin if there are `options`."""
    from vllm import __version__

    from tangram_vllm.refusals import SERVED_VLLM

    own = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
    }
    if options is not None:
        untested = not __version__.startswith(f"{SERVED_VLLM}.")
        own["TANGRAM_VLLM"] = json.dumps(options | ({"untested_vllm": True} if untested else {}))
    return own


class Forked(NamedTuple):
    """Whether the work of a process succeeded, and its log."""

    succeeded: bool
    log: str


def fork(work: Callable[[], object], variables: dict[str, str]) -> Forked:
    """What came of `work` in a forked process.

    The parent must not compute with torch: its threads are not in the child. Nor must it import
    llvmlite, so none of Tangram's kernels: vLLM 0.32.0 fails in a process that has it.
    """
    with tempfile.TemporaryFile() as log:
        child = os.fork()
        if child == 0:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1, closefd=False)
            for handler in logging.getLogger("vllm").handlers:
                handler.setStream(sys.stdout)  # type: ignore[attr-defined]
            os.environ |= variables
            try:
                work()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        _, status = os.waitpid(child, 0)
        log.seek(0)
        return Forked(status == 0, log.read().decode(errors="replace"))


def attempt(
    engine: dict[str, Any], rounds: list[list[Request]], options: dict[str, Any] | None
) -> tuple[EngineOutcome | None, str]:
    """What came of an engine, None if it did not start, and its log."""
    import driver  # which imports vLLM

    with tempfile.TemporaryDirectory() as name:
        found = Path(name) / "found.json"
        job = {"engine": driver.on_device(options is not None) | engine, "rounds": rounds}
        done = fork(lambda: found.write_text(json.dumps(driver.run(job))), environment(options))
        if not done.succeeded:
            return None, done.log
        return EngineOutcome(**json.loads(found.read_text()), log=done.log), done.log


def run(
    engine: dict[str, Any], rounds: list[list[Request]], options: dict[str, Any] | None
) -> EngineOutcome:
    """What came of an engine, which must start. `options` are the plugin's; None is stock vLLM."""
    outcome, log = attempt(engine, rounds, options)
    assert outcome is not None, log[-6000:]
    return outcome


def make_tiny(folder: Path) -> None:
    """A random Llama whose answers repeat themselves and then do not, and a tokenizer of bytes."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        initializer_range=0.07,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    names += [f"<{place}>" for place in range(len(names), 300)]
    tokenizer = Tokenizer(models.BPE({name: at for at, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<299>").save_pretrained(folder)


def make_gate(path: Path) -> Path:
    """A random gate for the tiny model."""
    import torch

    shape = GateShape(layers=3, hidden=128, kv_heads=2, group_size=2, head_dim=8, sinks=4)
    torch.manual_seed(6)
    layers = [
        {name: torch.randn(size) for name, size in shape.tensor_shapes().items()} for _ in range(3)
    ]
    save_gate(path, Gate(shape, tuple(layers)))
    return path


def tiny_profile(
    scorer: str = "keydiff", kv_retention: float = 0.5, gate: Path | None = None
) -> Profile:
    """Uneven budgets for the tiny model."""
    budgets = np.random.default_rng(3).uniform(0.1, 0.9, (3, 2))
    made = make_scorer(scorer, gate=gate)
    return Profile.from_statistics(
        budgets,
        np.zeros_like(budgets),
        ProfileOptions(
            ModelFingerprint("tiny", "llama", 3, 2, 4, 32, 300),
            range(3),
            ScorerSpec(scorer, made.parameters()),
            default_scope(scorer),
            CHUNK,
            page_tokens=8,
            heads_per_page=2,
            sink_tokens=2,
            window_tokens=2,
        ),
        kv_retention,
        Calibration(1, "random"),
    )


def tiny_options(folder: Path, scorer: str = "keydiff") -> dict[str, str]:
    """The options of the plugin at ρ 0.5 for the tiny model, with files in `folder`."""
    path, gate = folder / f"{scorer}.json", folder / "gate.safetensors"

    def make() -> None:
        tiny_profile(scorer, gate=make_gate(gate) if takes_gate(scorer) else None).save(path)

    done = fork(make, {})
    assert done.succeeded, done.log
    return {"profile": str(path)} | ({"gate": str(gate)} if takes_gate(scorer) else {})


def smollm2_profile(scorer: str) -> Profile:
    """The shipped budgets of the embedded model, for `scorer`."""
    shipped = Profile.load(find_shipped_profiles() / SHIPPED)
    spec = ScorerSpec(scorer, make_scorer(scorer, model=shipped.model).parameters())
    return shipped.model_copy(update={"scorer": spec, "scope": default_scope(scorer)})


def prompt_of(tokens: int, seed: int, vocabulary: int = 256) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocabulary, tokens).tolist()
