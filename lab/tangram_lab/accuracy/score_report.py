"""Tables of cells in Markdown: scores by method and ρ, and paired differences between methods."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, TypeVar

from tangram_lab.accuracy.methods import Method, MethodName
from tangram_lab.accuracy.results import AnyCell, Cell, FidelityCell, MeasuredCell, Score, Setting

One = TypeVar("One", bound=MeasuredCell)
OneKind = TypeVar("OneKind", Cell, FidelityCell)

_DIFFERENCES: tuple[tuple[MethodName, MethodName], ...] = (
    ("static", "full"),
    ("static", "dynamic"),
    ("static", "uniform"),
    ("static", "one-shot"),
    ("dynamic", "full"),
    ("uniform", "full"),
    ("lossless", "full"),
)
_NONE = "–"


def report(cells: Sequence[AnyCell]) -> str:
    """A section for each suite and setting, then the machine.

    A section has scores, differences, tasks or categories, footprints, and recall of evidence if it
    was computed. Fidelity has divergence, agreement, perplexity and differences in divergence.
    Scores are means over samples in percent ± the standard error. A difference is taken sample by
    sample, between cells of the same questions. Without cells the report is one line.
    """
    if not cells:
        return "No cell has been measured.\n"
    settings = list(dict.fromkeys(cell.setting for cell in cells))
    sections = [
        _section([cell for cell in cells if cell.setting == setting], setting)
        for setting in settings
    ]
    return "\n".join([*sections, where(cells)])


def rows(cells: Iterable[One]) -> dict[tuple[str, str], dict[float, One]]:
    """The cells of one setting by (method and variant, scorer), then by ρ, the largest first.

    A variant names the settings that differ among the cells of one method. `full` has no scorer:
    "".
    """
    listed = list(cells)
    found: dict[tuple[str, str], dict[float, One]] = {}
    for cell in sorted(listed, key=lambda cell: -cell.method.kv_retention):
        key = (label(cell.method, [other.method for other in listed]), cell.method.scorer or "")
        found.setdefault(key, {})[cell.method.kv_retention] = cell
    order = list(
        dict.fromkeys(label(cell.method, [other.method for other in listed]) for cell in listed)
    )
    return dict(sorted(found.items(), key=lambda item: (order.index(item[0][0]), item[0][1])))


def label(method: Method, among: Sequence[Method]) -> str:
    """The method's name, and the settings that differ `among` the cells of that name."""
    variants = [set(other.variant()) for other in among if other.name == method.name]
    common = set.intersection(*variants)
    return ", ".join([method.name, *(part for part in method.variant() if part not in common)])


def difference(cell: AnyCell, other: AnyCell) -> Score:
    """`cell` less `other` over the samples of one setting: in score, or in divergence.

    Raises `TypeError` for cells of two kinds.
    """
    if isinstance(cell, FidelityCell) and isinstance(other, FidelityCell):
        pairs = zip(cell.passages, other.passages, strict=True)
        return Score.of([own.divergence - its.divergence for own, its in pairs])
    if not isinstance(cell, Cell) or not isinstance(other, Cell):
        raise TypeError(f"cells of kinds {cell.kind} and {other.kind} have no difference")
    theirs = {(sample.task, sample.number): sample.score for sample in other.samples}
    return Score.of([sample.score - theirs[sample.task, sample.number] for sample in cell.samples])


def _section(cells: Sequence[AnyCell], setting: Setting) -> str:
    aligned = (
        "contexts end where chunks do" if setting.aligned else "the end of a context stays raw"
    )
    title = f"### {setting.suite}, {setting.context_tokens:,} tokens: {setting.model}"
    note = (
        f"{setting.samples} samples, seed {setting.seed}, "
        f"weights in {setting.quantization or setting.dtype}, KV cache "
        f"{setting.kv_cache_dtype}; {aligned}."
    )
    given = [cell for cell in cells if isinstance(cell, FidelityCell)]
    answered = [cell for cell in cells if isinstance(cell, Cell)]
    tables = [*_answers(answered), *_fidelity(given)]
    return "\n\n".join([title, note, *(table for table in tables if table)]) + "\n"


def _answers(cells: Sequence[Cell]) -> list[str]:
    if not cells:
        return []
    scores = _by_retention(cells, "score, % ± standard error", lambda cell: percent(cell.score))
    differences = _differences(cells, lambda score: percent(score, signed=True))
    return [scores, differences, _parts(cells), _recalls(cells), _footprints(cells)]


def _fidelity(cells: Sequence[FidelityCell]) -> list[str]:
    if not cells:
        return []
    return [
        _by_retention(
            cells, "KL from full, nats ± standard error", lambda cell: plain(cell.divergence, 4)
        ),
        # The difference of a divergence from full is the divergence itself.
        _differences(
            [cell for cell in cells if cell.method.name != "full"],
            lambda less: plain(less, 4, signed=True),
        ),
        _by_retention(cells, "top-1 agreement, %", lambda cell: percent(cell.agreement)),
        _by_retention(cells, "perplexity", lambda cell: plain(cell.perplexity, 2)),
    ]


def _recalls(cells: Sequence[Cell]) -> str:
    """Empty where none was computed."""
    known = {cell.method: recall for cell in cells if (recall := cell.evidence_recall) is not None}
    shown = [cell for cell in cells if cell.method in known]
    corner = "recall of evidence, % ± standard error"
    return _by_retention(shown, corner, lambda cell: percent(known[cell.method])) if shown else ""


def _footprints(cells: Sequence[Cell]) -> str:
    shown = [cell for cell in cells if cell.footprint is not None]
    table = _by_retention(
        shown, "KV bytes held, of everything's", lambda cell: f"{cell.footprint:.3f}"
    )
    return table if shown else ""


def _by_retention(cells: Sequence[One], corner: str, shown: Callable[[One], str]) -> str:
    """A row for each method and scorer, a column for each ρ."""
    columns = sorted({cell.method.kv_retention for cell in cells}, reverse=True)
    lines = [
        [
            name,
            scorer or _NONE,
            *(shown(own[column]) if column in own else _NONE for column in columns),
        ]
        for (name, scorer), own in rows(cells).items()
    ]
    return _table([corner, "scorer", *(f"ρ {column:g}" for column in columns)], lines)


def _differences(cells: Sequence[OneKind], worded: Callable[[Score], str]) -> str:
    """A row for each pair of methods of one scorer and, unless it is full, one ρ."""
    columns: list[float] = sorted(
        {cell.method.kv_retention for cell in cells if cell.method.name != "full"}, reverse=True
    )
    found = rows(cells)
    lines = []
    for first, second in _DIFFERENCES:
        for (name, scorer), own in found.items():
            for (other_name, other_scorer), theirs in found.items():
                if (_name(own), _name(theirs)) == (first, second) and other_scorer in ("", scorer):
                    shown: list[str] = [_less(own, theirs, column, worded) for column in columns]
                    lines.append([f"{name} − {other_name}", scorer, *shown])
    return (
        _table(["difference", "scorer", *(f"ρ {column:g}" for column in columns)], lines)
        if lines
        else ""
    )


def _less(
    own: dict[float, OneKind],
    theirs: dict[float, OneKind],
    retention: float,
    worded: Callable[[Score], str],
) -> str:
    other = theirs.get(1.0, theirs.get(retention))
    return (
        _NONE
        if retention not in own or other is None
        else worded(difference(own[retention], other))
    )


def _name(own: Mapping[float, AnyCell]) -> MethodName:
    return next(iter(own.values())).method.name


def _parts(cells: Sequence[Cell]) -> str:
    """A row for each cell, a column for each category of questions, or else for each task.

    Empty for a single column.
    """
    found = {cell.method: _by_category(cell) or _by_task(cell) for cell in cells}
    parts = list(dict.fromkeys(part for means in found.values() for part in means))
    if len(parts) < 2:
        return ""
    lines = [
        [
            name,
            scorer or _NONE,
            f"{retention:g}",
            *(f"{100 * found[cell.method][part]:.1f}" for part in parts),
        ]
        for (name, scorer), own in rows(cells).items()
        for retention, cell in own.items()
    ]
    return _table(["method", "scorer", "ρ", *parts], lines)


def _by_task(cell: Cell) -> dict[str, float]:
    return {task: score.mean for task, score in cell.by_task.items()}


def _by_category(cell: Cell) -> dict[str, float]:
    """Means over questions."""
    answers = [answer for sample in cell.samples for answer in sample.answers]
    categories = sorted({answer.category for answer in answers if answer.category is not None})
    return {
        category: fmean(answer.score for answer in answers if answer.category == category)
        for category in categories
    }


def percent(score: Score, *, signed: bool = False) -> str:
    """ "63.2 ± 4.1", or "+1.5 ± 0.7"; without the error of a single sample."""
    mean = f"{100 * score.mean:+.1f}" if signed else f"{100 * score.mean:.1f}"
    return mean if score.stderr is None else f"{mean} ± {100 * score.stderr:.1f}"


def plain(score: Score, digits: int, *, signed: bool = False) -> str:
    """ "0.0123 ± 0.0004", as `percent` without the percent."""
    mean = f"{score.mean:{'+' if signed else ''}.{digits}f}"
    return mean if score.stderr is None else f"{mean} ± {score.stderr:.{digits}f}"


def where(cells: Sequence[AnyCell]) -> str:
    """The machines and versions of the measurements; several if they differ."""
    seconds = sum(cell.seconds for cell in cells)
    machines = "; ".join(dict.fromkeys(machine(cell.environment) for cell in cells))
    return f"{machines}. {len(cells)} cells, {seconds / 60:,.0f} minutes of measurement.\n"


def machine(environment: Mapping[str, Any]) -> str:
    """An `environment` in a line: "NVIDIA H200 · python 3.12.3, torch 2.11.0, … · 2026-11-22,
    0eff8bd".
    """
    versions = ", ".join(
        f"{name} {environment[name]}"
        for name in ("python", "torch", "transformers")
        if name in environment
    )
    device = environment.get("gpu", environment.get("cpu"))
    return f"{device} · {versions} · {environment.get('date')}, {environment.get('commit')}"


def _table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = ["---" if place < 2 else "---:" for place in range(len(header))]
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, rule, *lines])
