"""`tangram eval` on tiny random models: whole runs, with every method, and what they
leave behind.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, PretrainedConfig, PreTrainedTokenizerBase
from typer.testing import CliRunner

from tangram.cli import app
from tangram.compress.profile import Profile
from tangram.config import EngineConfig
from tangram.engine.llm import LLM
from tangram.errors import ConfigError
from tangram.model.load import LoadedModel
from tangram.types import SamplingParams
from tangram_lab.accuracy import engines
from tangram_lab.accuracy.engines import ModelBench, ask_questions
from tangram_lab.accuracy.methods import Method
from tangram_lab.accuracy.results import FidelityCell, Results
from tangram_lab.accuracy.sample_prompts import Alignment, Questions, filler_token
from tangram_lab.accuracy.score_report import plain
from tangram_lab.accuracy.work import count_work
from tests.mentions import mentioning, mentions

CONTEXT, CHUNK = 640, 128
LLAMA = LlamaConfig(
    vocab_size=49152,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=1024,
    pad_token_id=2,
    bos_token_id=1,
    eos_token_id=2,
)
BASE = EngineConfig(page_tokens=8, heads_per_page=2, kv_cache_gib=0.02, max_num_seqs=4)
ASKED = Questions("multiturn", ("key_values",), 2, CONTEXT, max_questions=2)
METHODS = [
    Method("full"),
    Method("uniform", 0.5, "keydiff", CHUNK, None, None, 4),
    Method("static", 0.5, "keydiff", CHUNK, "model", 2.0, 4),
    Method("static", 0.5, "keydiff", CHUNK, "model", 0.0, 4),
    Method("lossless", 1.0, "keydiff", CHUNK, "model", 2.0, 4),
]


@pytest.fixture
def loaded(
    adopt_tiny: Callable[[PretrainedConfig], LoadedModel], tmp_path: Path, monkeypatch: Any
) -> LoadedModel:
    monkeypatch.setenv("TANGRAM_CACHE", str(tmp_path))
    return adopt_tiny(LLAMA)


@pytest.fixture(scope="module")
def model(tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's config with a tokenizer that has a chat template."""
    folder = tmp_path_factory.mktemp("tiny")
    LLAMA.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def bench_of(loaded: LoadedModel, methods: Sequence[Method] = METHODS) -> tuple[ModelBench, Any]:
    bench = ModelBench.of(BASE, loaded, methods, calibration_samples=2)
    prompts = ASKED.prompts(bench.codec, Alignment(CONTEXT, filler_token(bench.codec)))
    return bench.for_prompts(prompts.samples), prompts


def test_contexts_leave_nothing_raw_and_questions_find_them_in_the_cache(
    loaded: LoadedModel,
) -> None:
    bench, prompts = bench_of(loaded)
    assert all(one.shared_tokens == CONTEXT for one in prompts.samples)
    for method in METHODS:
        told: list[int] = []
        engine = bench._engine(method)
        replies = ask_questions(engine, prompts.samples, told.append, method.kv_retention)
        assert sum(told) == count_work(prompts)
        assert [len(own) for own in replies] == [2, 2]
        assert all(reply.tokens >= 1 for own in replies for reply in own)
        assert engine.stats().cached_tokens == 2 * CONTEXT
        if method.name in ("uniform", "static"):
            tail = max(len(prompt) - CONTEXT for one in prompts.samples for prompt in one.prompts)
            longest = CONTEXT * 0.5 + tail + 64 + BASE.page_tokens
            for reply in (reply for own in replies for reply in own):
                # Of one head: k and v, D, float32; L · H
                entries = reply.held_bytes / (2 * 16 * 4) / 4
                assert entries <= longest


def test_a_reply_does_not_depend_on_who_asks_first(loaded: LoadedModel) -> None:
    bench, prompts = bench_of(loaded)
    for method in (METHODS[2], METHODS[4]):
        with bench.open([method]) as ask:
            together = ask(method, prompts.samples, lambda done: None)
            alone = [ask(method, [one], lambda done: None)[0] for one in reversed(prompts.samples)]
        assert [[r.text for r in own] for own in together] == [
            [r.text for r in own] for own in reversed(alone)
        ]


def test_methods_keep_different_entries(loaded: LoadedModel) -> None:
    """Random weights, so that replies hang on every entry."""
    bench, prompts = bench_of(loaded)
    replies = {}
    for method in METHODS:
        with bench.open([method]) as ask:
            found = ask(method, prompts.samples, lambda n: None)
            replies[method.title] = tuple(reply.text for own in found for reply in own)
    assert len(set(replies.values())) >= 3, replies


def test_lossless_replies_are_those_of_the_full_cache(loaded: LoadedModel) -> None:
    """Every token of them: random weights write what hangs on every entry."""
    bench, prompts = bench_of(loaded)
    found = []
    for method in (METHODS[0], METHODS[-1]):
        with bench.open([method]) as ask:
            found.append(ask(method, prompts.samples, lambda n: None))
    full, lossless = ([reply for own in replies for reply in own] for replies in found)
    assert [reply.text for reply in lossless] == [reply.text for reply in full]
    assert sum(reply.tokens for reply in lossless) > 20


def test_a_reply_does_not_depend_on_which_ratios_the_engine_serves(loaded: LoadedModel) -> None:
    methods = [replace(METHODS[2], kv_retention=ratio) for ratio in (0.25, 0.5, 0.75)]
    assert len({method.company for method in methods}) == 1
    (bench, prompts), alone = bench_of(loaded, methods), []
    for method in methods:
        with bench.open([method]) as ask:
            alone.append(ask(method, prompts.samples, lambda n: None))
    with bench.open(methods) as ask:
        assert [ask(method, prompts.samples, lambda n: None) for method in methods] == alone


def test_calibrations_are_kept_and_serve_every_alpha(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, _ = bench_of(loaded)
    wide, narrow = (bench.budgets.profile(method) for method in METHODS[2:4])
    assert wide.mean == narrow.mean and (wide.alpha, narrow.alpha) == (2.0, 0.0)
    assert wide.calibration.samples == 2

    def fail(*arguments: Any, **options: Any) -> None:
        raise AssertionError("calibrated again")

    monkeypatch.setattr("tangram_lab.accuracy.method_profiles.calibrate", fail)
    again, _ = bench_of(loaded)
    assert again.budgets.profile(METHODS[2]) == wide
    more = ModelBench.of(BASE, loaded, METHODS, calibration_samples=3)
    with pytest.raises(AssertionError, match="calibrated again"):
        more.budgets.profile(METHODS[2])


def test_one_pass_measures_every_retention(loaded: LoadedModel, tmp_path: Path) -> None:
    methods = [
        Method("static", ratio, "keydiff", CHUNK, "model", 2.0, 4) for ratio in (0.5, 0.25, 0.75)
    ]
    ModelBench.of(BASE, loaded, methods, calibration_samples=2).budgets.profile(methods[0])
    kept = [Profile.load(path) for path in tmp_path.glob("weights/*/calibrations/*")]
    assert sorted(profile.kv_retention for profile in kept) == [0.25, 0.5, 0.75]


def test_uniform_heads_keep_alike(loaded: LoadedModel) -> None:
    bench, _ = bench_of(loaded)
    profile = bench.budgets.profile(METHODS[1])
    assert (
        max(profile.sealed_pages) - min(profile.sealed_pages) <= 1
        and profile.realised_retention <= 0.5
    )


def test_what_no_engine_could_do_is_refused_before_anything_is_measured(
    loaded: LoadedModel,
) -> None:
    def refuse(method: Method, said: str, base: EngineConfig = BASE, samples: int = 2) -> None:
        with pytest.raises(ConfigError, match=mentioning(said)):
            ModelBench.of(base, loaded, [method], calibration_samples=samples)

    refuse(Method("static", 0.01, "keydiff", CHUNK, "model", 2.0, 4), "kv_retention 0.01 0.0625")
    refuse(Method("static", 0.5, "best", CHUNK, "model", 2.0, 4), "scorer 'best'")
    refuse(Method("static", 0.5, "keydiff", 100, "model", 2.0, 4), "chunk_tokens 100 page_tokens")
    refuse(METHODS[0], "calibration_samples 0", samples=0)
    refuse(METHODS[2], "gate 'g', fastkvzip", EngineConfig(gate="g"))
    bench = ModelBench.of(BASE, loaded, METHODS[:1], calibration_samples=2)
    long = Questions("ruler", ("niah_single_1",), 1, 1000).prompts(bench.codec, None)
    with pytest.raises(ConfigError, match=mentioning("context_tokens 1024")):
        bench.for_prompts(long.samples)


FLAGS = [
    "--suites",
    "ruler/niah_single_1,multiturn/key_values",
    "--methods",
    "full,static",
    "--retentions",
    "0.5",
    "--samples",
    "1",
    "--context-tokens",
    str(CONTEXT),
    "--max-questions",
    "2",
    "--chunk-tokens",
    str(CHUNK),
    "--calibration-samples",
    "2",
    "--page-tokens",
    "8",
    "--heads-per-page",
    "2",
    "--kv-cache-gib",
    "0.02",
    "--load-format",
    "dummy",
]


def test_full_is_what_the_model_answers_by_itself(model: Path, tmp_path: Path) -> None:
    """Without filler a prompt is a chat's, and what `LLM.chat` replies is what is graded."""
    kept = tmp_path / "r.json"
    options = [*FLAGS, "--methods", "full", "--no-align", "-o", str(kept)]
    result = CliRunner().invoke(app, ["eval", str(model), *options], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    (cell,) = [cell for cell in Results.load(kept).cells if cell.setting.suite == "multiturn"]
    llm = LLM(str(model), load_format="dummy", kv_retention=1.0, kv_cache_gib=0.02)
    (asked_of,) = (
        Questions("multiturn", ("key_values",), 1, CONTEXT, max_questions=2)
        .prompts(llm.engine.codec, None)
        .samples
    )
    sample = asked_of.sample
    chats = [
        [{"role": "user", "content": sample.context + question.text}]
        for question in sample.questions
    ]
    said = llm.chat(
        chats,
        [
            SamplingParams(temperature=0, max_tokens=question.max_tokens)
            for question in sample.questions
        ],
    )
    assert [answer.reply for answer in cell.samples[0].answers] == [
        one.outputs[0].text[:240] for one in said
    ]


def test_the_command_goes_on_where_it_was_interrupted(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, tables = tmp_path / "r.json", tmp_path / "r.md"
    monkeypatch.setenv("TANGRAM_CACHE", str(tmp_path / "cache"))
    options = ["eval", str(model), *FLAGS, "-o", str(kept), "--report", str(tables)]
    asking, calls = ask_questions, []

    def interrupt(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return asking(*arguments)

    monkeypatch.setattr(engines, "ask_questions", interrupt)
    assert CliRunner().invoke(app, options).exit_code != 0
    assert len(json.loads(kept.read_text())["cells"]) == 2 and not tables.exists()
    result = CliRunner().invoke(app, options, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    content = Results.load(kept)
    assert len(calls) == 5 and len(content.cells) == 4
    assert [(cell.method.name, cell.setting.suite) for cell in content.cells] == [
        ("full", "ruler"),
        ("full", "multiturn"),
        ("static", "ruler"),
        ("static", "multiturn"),
    ]
    assert all(cell.environment["cpu"] and cell.seconds > 0 for cell in content.cells)
    static = content.cells[3]
    assert (
        static.basis["calibration_samples"] == 2
        and static.footprint is not None
        and static.footprint < 0.75
    )
    assert "static − full" in tables.read_text() and "static" in result.output
    before = kept.read_text()
    assert CliRunner().invoke(app, options).exit_code == 0
    assert len(calls) == 5 and kept.read_text() == before


def test_the_picture_is_drawn(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("TANGRAM_CACHE", str(tmp_path / "cache"))
    picture = tmp_path / "r.png"
    options = [
        *FLAGS,
        "--methods",
        "full,uniform",
        "-o",
        str(tmp_path / "r.json"),
        "--plot",
        str(picture),
    ]
    result = CliRunner().invoke(app, ["eval", str(model), *options], catch_exceptions=False)
    assert result.exit_code == 0 and picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--retentions", "half"], "retentions 'half'"),
        (["--chunk-tokens", "64.5"], "chunk_tokens '64.5'"),
        (["--methods", "best"], "methods 'best'"),
        (["--suites", "ruler/niah"], "tasks 'niah'"),
        (["--locomo", "x.json"], "locomo x.json, suites"),
        (["--text", "x.txt"], "text x.txt, suites"),
        (["--suites", "fidelity"], "max_questions 2, fidelity"),
        (["--suites", "fidelity/x"], "suites 'fidelity/x' fidelity"),
        (["--suites", "fidelity,ruler/vt"], "chunk_tokens 128 fidelity"),
        (["--report", "none/r.md"], "report none"),
        (["--kv-cache-dtype", "int8"], "kv_cache_dtype int8, full"),
        (["--chunk-tokens", "128,96"], "chunk_tokens 96, 128"),
    ],
)
def test_what_cannot_be_run_is_refused_in_a_line(
    options: list[str], said: str, model: Path, tmp_path: Path
) -> None:
    result = CliRunner().invoke(
        app, ["eval", str(model), *FLAGS, "-o", str(tmp_path / "r.json"), *options]
    )
    assert result.exit_code == 2
    assert mentions(result.output, said) and "Traceback" not in result.output


def test_who_cannot_draw_hears_it_first(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tangram_lab.accuracy.plot.find_spec", lambda name: None)
    options = [*FLAGS, "-o", str(tmp_path / "r.json"), "--plot", str(tmp_path / "r.png")]
    result = CliRunner().invoke(app, ["eval", str(model), *options])
    assert result.exit_code == 2 and "pip install matplotlib" in " ".join(result.output.split())


def _fidelity_options() -> list[str]:
    most = FLAGS.index("--max-questions")  # fidelity asks none
    suite = "--suites fidelity --samples 3 --context-tokens 768 --chunk-tokens 256"
    grid = "--methods full,uniform,static --retentions 0.75,0.25"
    return [*FLAGS[:most], *FLAGS[most + 2 :], *suite.split(), *grid.split()]


def test_fidelity_falls_with_retention_and_is_kept_and_shown(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full cache expects what it expects; the less is kept the further it goes; what is there is
    not read again.
    """
    monkeypatch.setenv("TANGRAM_CACHE", str(tmp_path / "cache"))
    kept, tables = tmp_path / "r.json", tmp_path / "r.md"
    options = ["eval", str(model), *_fidelity_options(), "-o", str(kept), "--report", str(tables)]
    reads: list[str] = []
    reading = ModelBench._read_expected

    def interrupt(bench: ModelBench, method: Method, passages: Any) -> Any:
        reads.append(method.title)
        if len(reads) == 3:
            raise KeyboardInterrupt
        return reading(bench, method, passages)

    monkeypatch.setattr(ModelBench, "_read_expected", interrupt)
    assert CliRunner().invoke(app, options).exit_code != 0
    assert len(Results.load(kept).cells) == 2
    result = CliRunner().invoke(app, options, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    cells = [cell for cell in Results.load(kept).cells if isinstance(cell, FidelityCell)]
    assert (
        len(cells) == 5
        and len(reads) == 3 + 1 + 3
        and all(len(cell.passages) == 3 for cell in cells)
    )
    full, *others = cells
    assert (full.divergence.mean, full.agreement.mean) == (0.0, 1.0)
    by_method = {
        (cell.method.name, cell.method.kv_retention): cell.divergence.mean for cell in others
    }
    for name in ("uniform", "static"):
        assert 0.0 < by_method[name, 0.75] < by_method[name, 0.25]  # type: ignore[index]
    text = tables.read_text()
    assert f"| uniform | keydiff | – | {plain(cells[1].divergence, 4)} |" in text and "± " in text
    assert "− full" not in text, "of divergences from full, those from full are none"
    assert "perplexity" in text and "top-1 agreement" in text
