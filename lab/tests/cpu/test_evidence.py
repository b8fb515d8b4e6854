"""Recall of evidence: where evidence lies in tokens, what methods keep of it, and that this is what
engines keep.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, PretrainedConfig, PreTrainedTokenizerBase
from typer.testing import CliRunner

from bench.accuracy import evidence as bench_evidence
from bench.accuracy.evidence_file import RecallFile
from bench.accuracy.figures import EVIDENCE, thin
from bench.render.page import RESULTS
from lab.tests.cpu.test_eval import BASE, LLAMA
from lab.tests.host.test_locomo import document, make_question
from tangram.cli import app
from tangram.compress.profile import Profile
from tangram.compress.scorers import make_scorer
from tangram.engine.setup.observe import score_source
from tangram.engine.text.codec import TextCodec
from tangram.model.load import LoadedModel, load_model
from tangram_lab.accuracy.engines import ModelBench
from tangram_lab.accuracy.methods import Method
from tangram_lab.accuracy.recall import (
    competing,
    compute_kept_shares,
    everything,
    make_budget_rule,
    recall,
)
from tangram_lab.accuracy.results import Cell, Results
from tangram_lab.accuracy.sample_prompts import Alignment, Questions, evidence_tokens, filler_token
from tests.core.cpu.test_kept_positions import Ends
from tests.small_engines import GREEDY, profile_file, run, small_engine

Adopt = Callable[[PretrainedConfig], LoadedModel]
CONTEXT, CHUNK = 640, 128
UNIFORM = Method("uniform", 0.5, "keydiff", CHUNK, None, None, 4)
DYNAMIC = Method("dynamic", 0.5, "keydiff", CHUNK, "model")


@pytest.fixture
def locomo(tmp_path: Path) -> Path:
    """A file of one conversation, asked about turns all over it."""
    questions = [make_question(4, f"D{number}:1") for number in range(1, 7)]
    path = tmp_path / "7.json"
    path.write_text(
        json.dumps(document(*questions, make_question(1, "D1:2", "D1:4"))), encoding="utf-8"
    )
    return path


@pytest.fixture
def folder(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> Path:
    """A tiny model's config with a tokenizer that has a chat template."""
    path = tmp_path / "tiny"
    LLAMA.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.mark.parametrize("aligned", [True, False])
def test_the_tokens_of_evidence_are_its_text(
    tokenizer: PreTrainedTokenizerBase, locomo: Path, aligned: bool
) -> None:
    codec = TextCodec(tokenizer)
    alignment = Alignment(CHUNK, filler_token(codec)) if aligned else None
    samples = (
        Questions("locomo", None, None, CONTEXT, path=locomo).prompts(codec, alignment).samples
    )
    found = 0
    for sample in samples:
        assert aligned == bool(sample.filler_tokens)
        places = evidence_tokens(sample, codec)
        for prompt, question, pieces in zip(
            sample.prompts, sample.sample.questions, places, strict=True
        ):
            texts = [codec.decode(prompt[piece.start : piece.stop]) for piece in pieces]
            assert texts == list(question.evidence)
            found += len(texts)
    assert found == 8 and len(samples) > 1


def random_chunks(count: int = 3) -> list[Any]:
    """Scores [L 2, H 3, C 128] of each chunk."""
    rng = np.random.default_rng(0)
    return [rng.random((2, 3, CHUNK), dtype=np.float32) for _ in range(count)]


@pytest.mark.parametrize("retention", [0.75, 0.5, 0.25])
def test_dynamic_methods_keep_rho_of_random_evidence(retention: float) -> None:
    rule = competing(Method("dynamic", retention, "keydiff", CHUNK, "model"))
    shares = compute_kept_shares(random_chunks(), rule, 3 * CHUNK)
    assert shares.mean() == pytest.approx(retention, abs=0.005)
    assert recall(shares, [range(10, 120), range(140, 240)]) == pytest.approx(retention, abs=0.1)


@pytest.mark.parametrize("retention", [0.75, 0.5, 0.25])
def test_equal_budgets_keep_rho_of_random_evidence_and_the_best_of_any(
    adopt: Any, retention: float
) -> None:
    loaded, bench = adopt
    method = Method("uniform", retention, "keydiff", CHUNK, None, None, 4)
    rule = make_budget_rule(bench.budgets.equal(method), loaded.geometry)
    rng = np.random.default_rng(0)
    chunks = [rng.random((2, 2, CHUNK), dtype=np.float32) for _ in range(4)]
    best, worst = range(CHUNK + 20, CHUNK + 40), range(2 * CHUNK + 60, 2 * CHUNK + 90)
    chunks[1][..., 20:40], chunks[2][..., 60:90] = 2.0, -1.0
    shares = compute_kept_shares(chunks, rule, 4 * CHUNK)
    assert shares.mean() == pytest.approx(retention, abs=BASE.page_tokens / CHUNK)
    assert recall(shares, [range(20, 110)]) == pytest.approx(retention, abs=0.12)
    assert recall(shares, [best]) == 1 and recall(shares, [worst]) == 0
    assert recall(shares, [best, worst]) == pytest.approx(20 / 50), "of tokens, not of pieces"
    assert recall(shares, [best, best]) == 1 and recall(shares, []) is None


def test_everything_stays_of_full_and_of_what_fills_no_chunk() -> None:
    chunks = random_chunks(2)
    assert (compute_kept_shares(chunks, everything, 2 * CHUNK + 9) == 1).all()
    tail = compute_kept_shares(chunks, competing(DYNAMIC), 2 * CHUNK + 9)
    assert recall(tail, [range(2 * CHUNK, 2 * CHUNK + 9)]) == 1 and tail.mean() < 0.6
    assert compute_kept_shares([], competing(DYNAMIC), 5).tolist() == [1] * 5


@pytest.fixture
def adopt(
    adopt_tiny: Adopt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[LoadedModel, ModelBench]:
    monkeypatch.setenv("TANGRAM_CACHE", str(tmp_path))
    loaded = adopt_tiny(LLAMA)
    return loaded, ModelBench.of(BASE, loaded, [UNIFORM, DYNAMIC], calibration_samples=2)


def test_an_engine_keeps_the_same_positions_of_the_first_chunk(
    adopt_tiny: Adopt, tmp_path: Path
) -> None:
    """Later chunks see what is left of those before them, there."""
    small = LlamaConfig(**{**LLAMA.to_dict(), "num_hidden_layers": 3})
    loaded, chunk = adopt_tiny(small), 64
    prompt = [3 + (i * i) % 9000 for i in range(chunk + 5)]
    scores = next(iter(score_source(loaded, make_scorer("keydiff"), chunk_tokens=chunk)(prompt)))
    path = profile_file(loaded, tmp_path, chunk_tokens=chunk)
    options: dict[str, Any] = {"kv_retention": 0.5, "chunk_tokens": chunk, "profile": (path,)}
    engine = small_engine(loaded, records=True, **options)
    ends = Ends(engine)
    run(engine, [prompt], GREEDY)
    kept = make_budget_rule(Profile.load(path), loaded.geometry)(torch.from_numpy(scores), 0)
    found = ends.find_kept(ends.readings[0].chunk_keys[0]).chosen
    assert np.array_equal(found, kept.numpy()) and 0.3 < kept.float().mean() < 0.6


def test_one_pass_serves_all_methods_of_a_scorer_and_chunk(
    adopt: tuple[LoadedModel, ModelBench], locomo: Path
) -> None:
    _, bench = adopt
    prompts = Questions("locomo", None, None, CONTEXT, path=locomo).prompts(
        bench.codec, Alignment(CHUNK, filler_token(bench.codec))
    )
    made: list[tuple[str, int]] = []
    source = bench.budgets.source_of

    def source_of(name: str, chunk_tokens: int) -> Any:
        made.append((name, chunk_tokens))
        return source(name, chunk_tokens)

    bench = replace(bench, budgets=replace(bench.budgets, source_of=source_of))
    full, uniform, dynamic = (
        bench.recall(method, prompts) for method in (Method("full"), UNIFORM, DYNAMIC)
    )
    assert {recall for own in full for recall in own} == {1.0}
    for found in (uniform, dynamic):
        shares = [recall for own in found for recall in own if recall is not None]
        assert len(shares) == prompts.count and all(0 < share < 1 for share in shares)
    assert uniform != dynamic
    assert bench.recall(UNIFORM, prompts) == uniform and made == [("keydiff", CHUNK)]


def test_tangram_eval_reports_it_of_conversations(
    folder: Path, locomo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANGRAM_CACHE", str(tmp_path / "cache"))
    kept, tables = tmp_path / "r.json", tmp_path / "r.md"
    options = [
        "--suites",
        "locomo,ruler/niah_single_1",
        "--locomo",
        str(locomo),
        "--methods",
        "full,uniform,static",
        "--samples",
        "2",
        "--context-tokens",
        str(CONTEXT),
        "--retentions",
        "0.5",
        "--chunk-tokens",
        str(CHUNK),
        "--page-tokens",
        "8",
        "--heads-per-page",
        "2",
        "--kv-cache-gib",
        "0.02",
        "--load-format",
        "dummy",
        "-o",
        str(kept),
        "--report",
        str(tables),
    ]
    result = CliRunner().invoke(app, ["eval", str(folder), *options], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    cells = [cell for cell in Results.load(kept).cells if isinstance(cell, Cell)]
    by_method = {(cell.method.name, cell.setting.suite): cell.evidence_recall for cell in cells}
    full, uniform = by_method["full", "locomo"], by_method["uniform", "locomo"]
    assert full is not None and full.mean == 1 and uniform is not None and 0.2 < uniform.mean < 0.8
    assert by_method["full", "ruler"] is None and by_method["uniform", "ruler"] is None
    text = tables.read_text()
    assert text.count("| recall of evidence, % ± standard error |") == 1
    assert (
        f"| uniform | keydiff | – | {100 * uniform.mean:.1f} ± "
        in text.split("recall of evidence")[1]
    )


def test_result_files_without_it_are_read(tmp_path: Path) -> None:
    cells = thin(RESULTS).whole()[:2]
    content = Results(command="c", cells=cells).model_dump(mode="json")
    for answer in (
        answer for cell in content["cells"] for one in cell["samples"] for answer in one["answers"]
    ):
        del answer["evidence_recall"]
    (tmp_path / "old.json").write_text(json.dumps(content))
    assert Results.load(tmp_path / "old.json").cells == cells


def test_the_benchmark_goes_on_with_other_scorers_and_its_table_is_written(
    folder: Path,
    locomo: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TANGRAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(
        bench_evidence,
        "load_model",
        lambda model, device: load_model(str(folder), load_format="dummy"),
    )
    kept = tmp_path / EVIDENCE
    options = [
        "--locomo",
        str(locomo),
        "--context-tokens",
        str(CONTEXT),
        "--calibration-samples",
        "1",
        "-o",
        str(kept),
    ]
    for scorers in ("keydiff", "keydiff,streaming_llm"):
        assert bench_evidence.main([*options, "--scorers", scorers, "--retentions", "0.5"]) == 0
    found = RecallFile.load(kept)
    assert [own.scorer for own in found.passes] == ["keydiff", "streaming_llm"], "each once"
    assert [one.method for one in found.passes[0].recalls] == ["uniform", "static", "dynamic"]
    assert bench_evidence.main([*options, "--scorers", "keydiff", "--context-tokens", "700"]) == 2
    assert "context_tokens" in capsys.readouterr().err
