"""What `tangram eval` says in words: it follows from the figures, and from their errors."""

from __future__ import annotations

from pathlib import Path

from lab.tests.host.test_eval_run import STATIC, StubBench, measure
from tangram_lab.accuracy.methods import Method
from tangram_lab.accuracy.results import AnyCell, Cell, Fidelity, FidelityCell, Score
from tangram_lab.accuracy.verdict import verdict


def test_a_cost_is_the_paired_difference_with_its_error(tmp_path: Path) -> None:
    """Of three samples all right with everything kept, static has the first whole and three
    quarters of the others.
    """
    ruler, multiturn = verdict(measure(tmp_path / "r.json", StubBench()))
    assert ruler.startswith(
        "ρ 0.5 (static, keydiff) costs 16.7 ± 8.3 points on ruler: 83.3 % instead of 100.0 %"
    )
    assert "for 50 % of the KV bytes" in ruler and "within chance for 3 contexts" in ruler
    assert "on multiturn" in multiturn


def make_cell(cell: Cell, *scores: float) -> Cell:
    samples = tuple(
        sample.model_copy(
            update={
                "answers": tuple(one.model_copy(update={"score": score}) for one in sample.answers)
            }
        )
        for sample, score in zip(cell.samples, scores, strict=True)
    )
    return cell.model_copy(update={"samples": samples, "score": Score.of(scores)})


def test_the_words_follow_the_error(tmp_path: Path) -> None:
    cells = [
        cell for cell in measure(tmp_path / "r.json", StubBench()) if cell.setting.suite == "ruler"
    ]
    full, static = (
        next(cell for cell in cells if cell.method.name == name) for name in ("full", "static")
    )
    assert "costs 50.0 ± 0.0 points" in verdict([full, make_cell(static, 0.5, 0.5, 0.5)])[0]
    assert "more than chance for 3 contexts" in verdict([full, make_cell(static, 0.5, 0.5, 0.5)])[0]
    assert (
        "costs -33.3 ± 16.7 points"
        in verdict([make_cell(full, 0.5, 0.5, 0.5), make_cell(static, 1, 0.5, 1)])[0]
    )
    nothing = verdict([make_cell(full, 0, 0, 0), make_cell(static, 0, 0, 0)])
    assert nothing == [
        (
            "ρ 0.5 (static, keydiff) cannot be judged by ruler: even with everything kept the "
            "model "
            "answers none of it."
        )
    ]
    assert verdict([static]) == [] == verdict([full])


def test_of_real_text_it_says_what_changes(tmp_path: Path) -> None:
    setting = measure(tmp_path / "r.json", StubBench())[0].setting
    pieces = [
        Fidelity(divergence=0.1, agreement=same, surprise=2.1, full_surprise=2.0)
        for same in (0.9, 1.0)
    ]

    def read(method: Method) -> AnyCell:
        found = [replace_full(piece) for piece in pieces] if method.name == "full" else pieces
        return FidelityCell(
            method=method,
            setting=setting,
            basis={},
            passages=tuple(found),
            seconds=1.0,
            environment={},
        )

    (said,) = verdict([read(Method("full")), read(STATIC)])
    assert "the same at 95.0 ± 5.0 % of places, and moves perplexity from 7.39 to 8.17." in said


def replace_full(piece: Fidelity) -> Fidelity:
    return piece.model_copy(
        update={"surprise": piece.full_surprise, "agreement": 1.0, "divergence": 0.0}
    )
