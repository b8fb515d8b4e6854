"""One model on several devices answers as on one, and ends when one of them fails.

Ranks are processes that meet through gloo, or through NCCL where there are two GPUs. All that one
engine can show is shown with one, because a start takes seconds.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tangram.compress.profile import Profile
from tangram.config import EngineConfig
from tangram.engine.loop import Engine
from tangram.engine.setup.build import build_engine
from tangram.errors import ConfigError, EngineError, ModelError, ProfileError
from tangram.model.load import LoadedModel
from tangram.types import SamplingParams
from tests.mentions import mentioning
from tests.small_engines import (
    answer,
    drain,
    profile_file,
    run,
    scores_of,
    sealed_state,
    small_engine,
)
from tests.speculation import METHODS, draft_always

Adopt = Callable[[PretrainedConfig], LoadedModel]
DEVICE = "cuda" if torch.cuda.device_count() > 1 else "cpu"

SHAPE: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# A gate file, and the shape of its model.
GATE = Path(__file__).parents[2] / "fixtures" / "kvpress" / "gate.safetensors"
GATED = {
    **{"hidden_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8},
}
MODELS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
    "words": lambda: LlamaConfig(**(SHAPE | {"vocab_size": 49152})),
    "qwen3": lambda: Qwen3Config(**SHAPE, tie_word_embeddings=True),
    "qwen3_moe": lambda: Qwen3MoeConfig(**SHAPE, **MOE),
    "gemma3": lambda: Gemma3TextConfig(
        **SHAPE,
        sliding_window=40,
        layer_types=["sliding_attention", "full_attention"] * 1 + ["full_attention"],
    ),
    "gated": lambda: Qwen3Config(**(SHAPE | GATED)),
}


@dataclass(frozen=True)
class Checkpoint:
    """A random model on disk and in memory, and a profile of it."""

    folder: Path
    loaded: LoadedModel
    profile: str

    def config(self, ranks: int, **options: Any) -> EngineConfig:
        """As `small_engine` has it, over `ranks`.

        On GPUs without graphs: to compile layers and capture graphs takes a minute a start.
        """
        defaults: dict[str, Any] = {
            "enforce_eager": DEVICE == "cuda",
            "dtype": "float32",
            "device": DEVICE,
            "threads": 1,
            "kv_retention": 0.5,
            "profile": self.profile,
            "chunk_tokens": 32,
            "page_tokens": 8,
            "heads_per_page": 2,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 96,
            "kv_cache_gib": 0.01,
        }
        return EngineConfig(str(self.folder), tensor_parallel_size=ranks, **(defaults | options))

    def one(self, **options: Any) -> Engine:
        """The engine on one device."""
        return build_engine(self.config(1, **options))


@pytest.fixture(scope="module")
def checkpoint(
    adopt_tiny: Adopt, tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Checkpoint]:
    """Makes the checkpoint of a name of `MODELS`."""

    def make(name: str, **options: Any) -> Checkpoint:
        loaded, folder = adopt_tiny(MODELS[name]()), tmp_path_factory.mktemp(name)
        loaded.model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return Checkpoint(folder, loaded, profile_file(loaded, folder, **options))

    return make


def prompts(*lengths: int) -> list[list[int]]:
    """Random tokens; the shorter prompts are the beginnings of the longer ones."""
    longest = np.random.default_rng(0).integers(3, 300, 200).tolist()
    return [longest[:length] for length in lengths]


@pytest.fixture(scope="module")
def llama(checkpoint: Callable[..., Checkpoint]) -> Checkpoint:
    return checkpoint("llama")


@pytest.fixture(scope="module")
def two(llama: Checkpoint) -> Iterator[Engine]:
    """Two ranks, whose pages do not hold all prompts of `LONG` at a time; on GPUs with graphs."""
    engine = build_engine(llama.config(2, kv_cache_gib=TIGHT_GIB, enforce_eager=False))
    yield engine
    engine.stop()


TIGHT_GIB = 0.00016
LONG = (150, 140, 150, 33, 32, 31, 5)


def test_tokens_are_those_of_one_device(llama: Checkpoint, two: Engine) -> None:
    """Some are preempted on the way, since not all sequences fit."""
    one = llama.one()
    assert run(two, prompts(*LONG)) == run(one, prompts(*LONG))
    (tokens,) = prompts(200)
    others = [tokens[begin : begin + 40] for begin in range(0, 150, 25)]
    params = SamplingParams(temperature=0.0, max_tokens=70, ignore_eos=True)
    assert run(two, others, params) == run(one, others, params)
    assert two.stats().preemptions > 0


def test_prompts_score_as_on_one_device(llama: Checkpoint, two: Engine) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=1)
    asked = [(prompt, params) for prompt in prompts(*LONG)]
    for here, there in zip(answer(two, *asked), answer(llama.one(), *asked), strict=True):
        found, expected = scores_of(here), scores_of(there)
        assert [token.token_id for token, _ in found] == [token.token_id for token, _ in expected]
        assert [token.logprob for token, _ in found] == pytest.approx(
            [token.logprob for token, _ in expected], abs=1e-4
        )


def test_hits_equal_misses(two: Engine) -> None:
    """The state of a chunk is the same whether it is computed or found, to the bit."""
    two.clear_cache()
    (first,) = run(two, prompts(150))
    kept = sealed_state(two)
    before = two.stats().cached_tokens
    (again,) = run(two, prompts(150))
    assert two.stats().cached_tokens - before >= 128
    assert again == first
    two.clear_cache()
    run(two, prompts(70, 150, 33))
    state = sealed_state(two)
    assert kept.keys() <= state.keys()
    for key, pages in kept.items():
        assert torch.equal(pages, state[key])


def test_page_counts_are_those_of_the_profile(llama: Checkpoint, two: Engine) -> None:
    """A rank keeps half of what the profile keeps, in pages of one head, and what levels them."""
    profile = Profile.load(llama.profile)
    pages = sum(
        len(group) * kept for group, kept in zip(profile.groups, profile.sealed_pages, strict=True)
    )
    numbers = two.layout.span_pages
    assert numbers == pages / 2, "2 heads a page: as many heads of each depth on both ranks"
    two.clear_cache()
    run(two, prompts(33))
    nodes = two._scheduler.cache.prefix.nodes.values()
    assert sum(len(node.pages) for node in nodes if not node.transient) == numbers


def test_a_rank_that_dies_ends_the_engine_with_its_name(two: Engine) -> None:
    """The last test of this engine."""
    assert two._ranks is not None
    process = two._ranks._processes[0]
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match=mentioning(f"rank 1 2 {process.pid} signal 9")):
        run(two, prompts(60))
    with pytest.raises(EngineError, match=mentioning("rank 1 2")):
        run(two, prompts(5))
    assert process.poll() is not None
    assert not torch.distributed.is_initialized()


@pytest.mark.skipif(DEVICE == "cuda", reason="a rank on the CPU stands for one on a GPU")
def test_nccl_is_aborted_in_a_thread_and_waits_for_graphs(
    llama: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NCCL does: it ends kernels at once, and returns when no graph holds one of them."""
    aborted, dropped = Event(), Event()

    def abort() -> None:
        aborted.set()
        assert dropped.wait(60)
        torch.distributed.destroy_process_group()

    engine = build_engine(llama.config(2, device="cpu"))
    monkeypatch.setattr("tangram.engine.ranks.ranks._uses_nccl", lambda: True)
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_abort_process_group", abort)
    assert engine._ranks is not None
    engine._runner.passes.graphs = SimpleNamespace(forget=dropped.set)  # type: ignore[assignment]
    process = engine._ranks._processes[0]
    os.kill(process.pid, signal.SIGKILL)
    assert aborted.wait(60) and not dropped.is_set()
    with pytest.raises(EngineError, match=mentioning(f"rank 1 2 {process.pid} signal 9")):
        run(engine, prompts(5))
    engine.stop()
    assert dropped.is_set() and not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "int8"}, "quantization int8 tensor_parallel_size 2"),
        ({"load_format": "dummy"}, "load_format dummy tensor_parallel_size 2"),
        ({"overflow_every": 4}, "overflow_every 4 tensor_parallel_size 2"),
        (
            {"speculative_config": {"method": "draft_model", "model": "smollm2"}},
            "speculative_config.method draft_model tensor_parallel_size 2",
        ),
    ],
)
def test_options_of_one_device_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=mentioning(message)):
        EngineConfig(tensor_parallel_size=2, **options)


def test_a_loaded_model_lies_on_one_device(llama: Checkpoint) -> None:
    with pytest.raises(ConfigError, match=mentioning("tensor_parallel_size 2")):
        small_engine(llama.loaded, tensor_parallel_size=2)


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_moe", "gemma3"])
def test_every_family_answers_as_on_one_device(
    checkpoint: Callable[..., Checkpoint], name: str, ranks: int
) -> None:
    if DEVICE == "cuda" and torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    made = checkpoint(name)
    engine = build_engine(made.config(ranks))
    try:
        wanted = run(made.one(), prompts(*LONG))
        assert run(engine, prompts(*LONG)) == wanted
        assert run(engine, prompts(*LONG)) == wanted, "as misses and as hits"
    finally:
        engine.stop()


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options",
    [
        {"kv_offload_gib": 0.01, "kv_cache_gib": TIGHT_GIB},
        {"kv_offload_gib": 0.01, "kv_offload_dtype": "int4", "kv_cache_gib": TIGHT_GIB},
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": "int8"},
        {"speculative_config": {"method": "ngram"}},
        {"speculative_config": {"method": "suffix"}},
        {"kv_retention": 1.0, "profile": ()},
        {"enable_prefix_caching": False},
    ],
    ids=["host", "int4", "fp8", "int8", "ngram", "suffix", "everything", "uncached"],
)
def test_modes_answer_as_on_one_device(llama: Checkpoint, options: dict[str, Any]) -> None:
    engine = build_engine(llama.config(2, **options))
    one = llama.one(**options)
    try:
        for lengths in (LONG, LONG[::-1]):
            assert run(engine, prompts(*lengths)) == run(one, prompts(*lengths))
        drain(engine)
    finally:
        engine.stop()


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options",
    [{}, {"kv_offload_gib": 0.01}, {"kv_cache_dtype": "fp8"}],
    ids=["plain", "host", "fp8"],
)
def test_the_model_drafts_for_itself_as_on_one_device(
    llama: Checkpoint, options: dict[str, Any]
) -> None:
    """As many of its drafts are accepted: every rank reads the entries that are kept first."""
    given = {"kv_retention": 1.0, "speculative_config": METHODS["compressed_kv"]} | options
    tight = 2 * TIGHT_GIB if "kv_offload_gib" in options else 0.01
    engine, one = (  # with as many pages
        build_engine(llama.config(ranks, **given, kv_cache_gib=2 * tight / ranks))
        for ranks in (2, 1)
    )
    try:
        for lengths in (LONG, LONG[::-1]):
            answers = [
                run(draft_always(drafting, 3, 1, 4, 0), prompts(*lengths))
                for drafting in (engine, one)
            ]
            assert answers[0] == answers[1]
        drafted, wanted = engine.stats().speculation, one.stats().speculation
        assert drafted == wanted
        assert drafted is not None and 0 < drafted.accepted < drafted.drafted
    finally:
        engine.stop()


@pytest.mark.nightly
@pytest.mark.parametrize("scorer", ["snapkv", "expected_attention", "kvzip", "streaming_llm"])
def test_scorers_choose_as_on_one_device(
    checkpoint: Callable[..., Checkpoint], scorer: str
) -> None:
    """KVzip repeats a chunk in words of the tokenizer, SnapKV needs 33 tokens of a chunk."""
    made = checkpoint("words", scorer=scorer, chunk_tokens=64)
    engine = build_engine(made.config(2, chunk_tokens=64))
    try:
        assert run(engine, prompts(*LONG)) == run(made.one(chunk_tokens=64), prompts(*LONG))
    finally:
        engine.stop()


@pytest.mark.nightly
@pytest.mark.skipif(DEVICE == "cuda", reason="Triton multiplies no heads of 8 dimensions")
def test_a_gate_chooses_as_on_one_device(checkpoint: Callable[..., Checkpoint]) -> None:
    """Each rank has the part of the gate that scores its heads."""
    made = checkpoint("gated", scorer="fastkvzip", gate=GATE)
    engine = build_engine(made.config(2, gate=str(GATE)))
    try:
        wanted = run(made.one(gate=str(GATE)), prompts(*LONG))
        assert run(engine, prompts(*LONG)) == wanted
        assert wanted != run(made.one(kv_retention=1.0, profile=()), prompts(*LONG))
    finally:
        engine.stop()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("options", "ranks", "error", "message"),
    [
        pytest.param(
            {},
            3,
            ConfigError,
            "tensor_parallel_size 3 4",
            marks=pytest.mark.skipif(
                DEVICE == "cuda" and torch.cuda.device_count() < 3, reason="needs three GPUs"
            ),
        ),
        ({"profile": (), "scorer": "expected_attention"}, 2, ProfileError, "calibrate"),
        ({"max_model_len": 4096}, 2, ConfigError, "max_model_len 4096"),
    ],
    ids=["heads", "profile", "length"],
)
def test_an_engine_that_cannot_be_built_leaves_no_process(
    llama: Checkpoint, options: dict[str, Any], ranks: int, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=mentioning(message)):
        build_engine(llama.config(ranks, **options))
    assert not ranks_of(os.getpid())
    assert not torch.distributed.is_initialized()


@pytest.mark.nightly
def test_a_model_without_a_plan_is_refused(
    llama: Checkpoint, tmp_path: Path, adopt_tiny: Adopt, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Transformers says how models are cut."""
    moe = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 40}
    adopt_tiny(GptOssConfig(**SHAPE, **moe)).model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=mentioning("GptOssForCausalLM")):
        build_engine(replace(llama, folder=tmp_path).config(2))
    assert not ranks_of(os.getpid())


@pytest.mark.nightly
def test_a_scorer_that_needs_all_heads_is_refused(checkpoint: Callable[..., Checkpoint]) -> None:
    made = checkpoint("llama", scorer="tova", scope="layer")
    with pytest.raises(ConfigError, match=mentioning("scorer 'tova'")):
        build_engine(made.config(2))
    assert not ranks_of(os.getpid())


def ranks_of(process: int) -> Sequence[int]:
    """The ranks that `process` has started and that still run."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = re.sub(r"\(.*\)", "", (entry / "stat").read_text()).split()
            command = (entry / "cmdline").read_text()
        except OSError:
            continue
        if int(fields[2]) == process and "rank_process" in command:
            found.append(int(entry.name))
    return found


def test_a_rank_that_does_not_start_is_named(
    llama: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tangram.engine.ranks.ranks.WORKER", "tangram.there_is_no_such_module")
    with pytest.raises(EngineError, match=mentioning("rank 1 2")):
        build_engine(llama.config(2))
    assert not torch.distributed.is_initialized()


def test_all_ranks_find_the_profile_that_one_device_has_kept(
    checkpoint: Callable[..., Checkpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is kept for a digest of whole weights, of which each rank has a part."""
    monkeypatch.setenv("TANGRAM_CACHE", str(tmp_path))
    tiny = checkpoint("qwen3_moe")
    kept = tiny.loaded.kept_folder / "profiles" / "kept.json"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(Path(tiny.profile).read_bytes())
    engine = build_engine(tiny.config(2, profile=()))
    try:
        assert [one.kv_retention for one in engine.admission.retentions] == [0.5, 1.0]
    finally:
        engine.stop()
