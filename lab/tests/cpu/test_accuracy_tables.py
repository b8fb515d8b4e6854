"""docs/accuracy-tables.md: thin files lose nothing that a table needs, tables say what cells say,
and the grid can be run.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer import Typer
from typer.testing import CliRunner

from bench.accuracy import grid, keep
from bench.accuracy.figures import KEPT, NEEDLES, mean_difference, mean_score
from bench.accuracy.thin import Thin
from bench.render import __main__ as render
from bench.render.page import DOCS, Page
from tangram.compress.profile import ALPHA
from tangram.compress.scorers import default_scope
from tangram_lab.accuracy.methods import Grid, Method, choose_alignment
from tangram_lab.accuracy.results import (
    AnsweredSample,
    AnyCell,
    Cell,
    Fidelity,
    FidelityCell,
    Results,
    Score,
    Setting,
)
from tangram_lab.accuracy.score_report import difference
from tangram_lab.cli.evaluate import evaluate

TASKS = ("niah_multikey_1", "vt")


def setting(suite: str, **changes: Any) -> Setting:
    told = {
        "model": "m",
        "weights_sha256": "0",
        "dtype": "float32",
        "kv_cache_dtype": "auto",
        "page_tokens": 16,
        "heads_per_page": 4,
        "suite": suite,
        "samples": 4,
        "context_tokens": 4096,
        "seed": 0,
        "aligned": True,
        "prompts_sha256": suite,
    }
    return Setting(**told | changes)


def cell(method: Method, suite: str, scores: list[float], **changes: Any) -> Cell:
    samples = tuple(
        AnsweredSample.model_validate(
            {
                "task": TASKS[number % 2],
                "number": number,
                "answers": [{"score": score, "reply": "so", "prompt_tokens": 9, "reply_tokens": 1}]
                * 2,
            }
        )
        for number, score in enumerate(scores)
    )
    by_task = {task: Score.of([one.score for one in samples if one.task == task]) for task in TASKS}
    return Cell(
        method=method,
        setting=setting(suite, **changes),
        basis={},
        seconds=2.0,
        environment={"gpu": "g"},
        score=Score.of(scores),
        by_task=by_task,
        footprint=0.5,
        filler_tokens=1.0,
        samples=samples,
    )


def needles(method: Method, scores: list[float], suite: str = "multiturn") -> Cell:
    """Of questions about needles alone: among the same lines again and again, or in `ruler`'s
    prose.
    """
    whole, tasks = cell(method, suite, scores, prompts_sha256="needles"), sorted(NEEDLES[suite][1])
    samples = tuple(
        one.model_copy(update={"task": tasks[number % len(tasks)]})
        for number, one in enumerate(whole.samples)
    )
    return whole.model_copy(
        update={"samples": samples, "by_task": dict.fromkeys(tasks, whole.score)}
    )


def read(method: Method, divergences: list[float], surprise: float) -> FidelityCell:
    passages = tuple(
        Fidelity(divergence=one, agreement=0.9, surprise=surprise, full_surprise=1.9)
        for one in divergences
    )
    return FidelityCell(
        method=method,
        setting=setting("fidelity"),
        basis={},
        seconds=1.0,
        environment={"gpu": "g"},
        passages=passages,
    )


tables = Page("accuracy-tables").shared["tables"]
UNIFORM = Method("uniform", 0.3, "kvzip", 512, None, None, 4)
STATIC = Method("static", 0.3, "kvzip", 512, "model", ALPHA, 4)
DYNAMIC = Method("dynamic", 0.3, "kvzip", 512, "model")
ONE_SHOT = Method("one-shot", 0.3, "kvzip", 4096, "model")
CELLS: list[AnyCell] = [
    *(cell(Method("full"), suite, [1.0, 1.0, 1.0, 0.0]) for suite in ("ruler", "multiturn")),
    *(cell(UNIFORM, suite, [0.0, 0.0, 0.0, 0.0]) for suite in ("ruler", "multiturn")),
    cell(STATIC, "ruler", [1.0, 0.0, 1.0, 0.0]),
    cell(STATIC, "multiturn", [1.0, 1.0, 1.0, 0.0]),
    cell(DYNAMIC, "ruler", [1.0, 1.0, 1.0, 0.0]),
    cell(DYNAMIC, "multiturn", [1.0, 0.5, 1.0, 0.0]),
    *(cell(ONE_SHOT, suite, [1.0, 1.0, 0.0, 0.0]) for suite in ("ruler", "multiturn")),
    *(
        cell(replace(STATIC, alpha=2.0), suite, [0.0, 0.0, 1.0, 0.0])
        for suite in ("ruler", "multiturn")
    ),
    *(
        cell(replace(STATIC, chunk_tokens=1024), suite, [0.0, 1.0, 1.0, 1.0])
        for suite in ("ruler", "multiturn")
    ),
    *(
        cell(STATIC, suite, [0.0, 0.0, 0.0, 1.0], aligned=False, prompts_sha256=f"raw {suite}")
        for suite in ("ruler", "multiturn")
    ),
    needles(UNIFORM, [0.0, 0.0, 1.0, 0.0]),
    needles(STATIC, [1.0, 0.0, 1.0, 1.0]),
    needles(replace(UNIFORM, chunk_tokens=4096), [1.0, 1.0, 1.0, 1.0]),
    needles(UNIFORM, [0.0, 0.0, 0.0, 0.0], "ruler"),
    needles(STATIC, [1.0, 0.0, 1.0, 1.0], "ruler"),
    *(
        cell(replace(STATIC, window_tokens=64), suite, [1.0, 1.0, 1.0, 1.0])
        for suite in ("ruler", "multiturn")
    ),
    read(Method("full"), [0.0, 0.0], 1.9),
    read(STATIC, [0.1, 0.2], 2.0),
    read(DYNAMIC, [0.1, 0.1], 2.0),
]


def test_a_thin_file_gives_the_same_tables_and_every_cell_once(tmp_path: Path) -> None:
    files = [Results(command="one", cells=CELLS[:8]), Results(command="two", cells=CELLS)]
    thin = Thin.of(files)
    assert thin.commands == ["one", "two"] and len(thin.cells) == len(CELLS)
    thin.save(tmp_path / "thin.json")
    kept = Thin.load(tmp_path / "thin.json")
    assert kept == thin and tables(kept.whole()) == tables(CELLS) != ""
    assert len((tmp_path / "thin.json").read_text()) < len(files[1].model_dump_json()) / 3


def test_cells_of_other_samples_are_not_thrown_together() -> None:
    with pytest.raises(ValueError, match="ruler"):
        Thin.of([Results(command="c", cells=[CELLS[0], cell(STATIC, "ruler", [1.0, 0.0])])])


def test_means_count_each_suite_the_same_and_differences_go_sample_by_sample() -> None:
    static, dynamic = CELLS[4:6], CELLS[6:8]
    assert mean_score(static).mean == pytest.approx((0.5 + 0.75) / 2)  # type: ignore[arg-type]
    both = mean_difference(list(zip(static, dynamic, strict=True)))
    assert both.mean == pytest.approx((-0.25 + 0.125) / 2)
    apart = [difference(*pair).stderr or 0.0 for pair in zip(static, dynamic, strict=True)]
    assert both.stderr == pytest.approx((apart[0] ** 2 + apart[1] ** 2) ** 0.5 / 2)


@pytest.mark.parametrize(
    ("title", "line"),
    [
        ("Scores", "| static | kvzip | 62.5 ± 19.1 |"),
        ("Static budgets beside the dynamic method", "| kvzip | -6.2 ± 14.0 |"),
        ("Static budgets beside equal ones", "| kvzip | +62.5 ± 19.1 |"),
        ("Several needles", "| kvzip | +75.0"),
        ("Several needles", "| kvzip | +50.0"),
        ("Sealed chunk by chunk", "| kvzip | +18.8 ± 20.1 | – | – |"),
        ("Chunks", "| static, C 1024 | kvzip | 75.0 ± 17.7 |"),
        ("What is expected of real text", "| static | kvzip | 0.1500 ± 0.0500 |"),
    ],
)
def test_a_table_says_what_its_cells_say(title: str, line: str) -> None:
    found = next(one for one in tables(CELLS).split("### ") if one.startswith(title))
    assert line in found


def test_tasks_stand_beside_what_the_full_cache_can_do_of_them() -> None:
    static = [cell(replace(STATIC, kv_retention=0.5), "ruler", [1.0, 0.0, 1.0, 0.0])]
    found = next(
        one for one in tables([*CELLS, *static]).split("### ") if one.startswith("Task by task")
    )
    assert "| ruler, ρ 0.5, % | samples | full | static, kvzip |" in found
    assert "| vt | 2 | 50.0 ± 50.0 | 0.0 ± 0.0 |" in found


def test_a_table_without_cells_is_left_out() -> None:
    assert tables([]) == "" and "Chunks" not in tables(CELLS[:4])


def test_the_tables_are_written_into_the_page(tmp_path: Path) -> None:
    at, results = tmp_path / "accuracy-tables.md", tmp_path / "results.json"
    at.write_text((DOCS / "accuracy-tables.md").read_text())
    Results(command="tangram eval tiny", cells=CELLS).save(results)
    keep.main([str(results), "--kept", str(tmp_path)])
    assert len(Thin.load(tmp_path / KEPT).cells) == len(CELLS)
    for _ in range(2):
        assert (
            render.main(["accuracy-tables", "--docs", str(tmp_path), "--results", str(tmp_path)])
            == 0
        )
        text = at.read_text()
        assert text.count("| kvzip | +62.5 ± 19.1 |") == 1 and "Asked by 1 commands" in text
    assert text.startswith("# Accuracy") and text.rstrip().endswith("<!-- end eval -->")


def test_results_are_added_to_what_is_kept(tmp_path: Path) -> None:
    for number, cells in enumerate((CELLS[:4], CELLS)):
        Results(command=f"command {number}", cells=cells).save(tmp_path / f"{number}.json")
        keep.main([str(tmp_path / f"{number}.json"), "--kept", str(tmp_path), *["--add"] * number])
    kept = Thin.load(tmp_path / KEPT)
    assert kept.commands == ["command 0", "command 1"] and len(kept.cells) == len(CELLS)
    with pytest.raises(SystemExit):
        keep.main(["--kept", str(tmp_path)])


def test_every_task_of_the_grid_is_one_that_tangram_eval_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[Grid, Any, int | None]] = []

    def compare(
        base: object,
        grid: Grid,
        asked_of: Any,
        *,
        align: bool,
        align_tokens: int | None,
        **_: object,
    ) -> list[AnyCell]:
        asked.append(
            (
                grid,
                asked_of,
                choose_alignment(grid.methods(4096, default_scope), align=align, unit=align_tokens),
            )
        )
        return []

    monkeypatch.setattr("tangram_lab.accuracy.evaluation.compare", compare)
    app = Typer()
    app.command()(evaluate)
    tasks = list(grid.tasks(grid.SCORERS, list(grid.PARTS), None, None))
    for task in tasks:
        result = CliRunner().invoke(app, ["smollm2", *task.options])
        assert result.exit_code == 0, result.output
    assert len(asked) == len(tasks) == len({task.name for task in tasks})
    for task, (own, questions, unit) in zip(tasks, asked, strict=True):
        assert own.methods(4096, default_scope) and all(
            one.context_tokens == 4096 for one in questions
        )
        if not task.name.startswith("alphas."):
            assert list(own.alphas) == [ALPHA], "what the tables call static is the α of profiles"
        if task.name.split(".")[0] not in ("fidelity", "raw-end"):
            assert unit == 4096, "one alignment for all that stand in one table"


def test_a_scorer_that_needs_a_gate_is_left_out_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []

    def measure(task: grid.GridRun, options: argparse.Namespace) -> int:
        measured.append(task.name)
        return int(task.name == "chunks.snapkv")

    monkeypatch.setattr(grid, "measure", measure)
    assert grid.main([str(tmp_path)]) == 1
    assert {"full.kvzip", "base.tova", "window-0.keydiff", "base.fastkvzip"} < set(measured)
    assert {"chunks.kvzip.0.5.2048", "base.kvzip.0.25"} < set(measured), (
        "a slow scorer has a process for each ρ"
    )
    assert "full.keydiff" not in measured
    measured.clear()
    other = [str(tmp_path), "--model", "other", "--parts", "base"]
    assert grid.main(other) == 0
    assert "base.kvzip.0.7" in measured and "base.fastkvzip" not in measured
    with pytest.raises(SystemExit):
        grid.main([*other, "--scorers", "fastkvzip"])
    assert grid.main([*other, "--scorers", "fastkvzip", "--gate", "g"]) == 0
    assert measured[-1] == "base.fastkvzip"
