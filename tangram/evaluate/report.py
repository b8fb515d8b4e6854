"""Cells to tables in Markdown: scores by method and ρ, and paired differences between methods."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import fmean

from tangram.evaluate.methods import Method, MethodName
from tangram.evaluate.results import Cell, Score, Setting

_DIFFERENCES: tuple[tuple[MethodName, MethodName], ...] = (
    ("static", "full"),
    ("static", "dynamic"),
    ("static", "uniform"),
    ("static", "one-shot"),
    ("dynamic", "full"),
    ("uniform", "full"),
)
_NONE = "–"


def report(cells: Sequence[Cell]) -> str:
    """A section for each suite and setting: scores, differences, tasks or categories, footprints; then the machine.

    Scores are means over samples in percent ± the standard error. A difference is taken sample by sample, of cells that
    were asked the same. Nothing but a line where there are no cells.
    """
    if not cells:
        return "No cell has been measured.\n"
    settings = list(dict.fromkeys(cell.setting for cell in cells))
    sections = [_section([cell for cell in cells if cell.setting == setting], setting) for setting in settings]
    return "\n".join([*sections, _where(cells)])


def rows(cells: Iterable[Cell]) -> dict[tuple[str, str], dict[float, Cell]]:
    """The cells of one setting by (method and variant, scorer), and there by ρ, the largest first.

    A variant is named as far as it differs among the cells of one method. `full` has no scorer: "".
    """
    listed = list(cells)
    found: dict[tuple[str, str], dict[float, Cell]] = {}
    for cell in sorted(listed, key=lambda cell: -cell.method.kv_retention):
        key = (label(cell.method, [other.method for other in listed]), cell.method.scorer or "")
        found.setdefault(key, {})[cell.method.kv_retention] = cell
    order = list(dict.fromkeys(label(cell.method, [other.method for other in listed]) for cell in listed))
    return dict(sorted(found.items(), key=lambda item: (order.index(item[0][0]), item[0][1])))


def label(method: Method, among: Sequence[Method]) -> str:
    """The method's name, and what tells it from others `among` them that have the same name."""
    variants = [set(other.variant()) for other in among if other.name == method.name]
    common = set.intersection(*variants)
    return ", ".join([method.name, *(part for part in method.variant() if part not in common)])


def difference(cell: Cell, other: Cell) -> Score:
    """Of two cells of one setting: `cell` less `other`, over the samples."""
    theirs = {(sample.task, sample.number): sample.score for sample in other.samples}
    return Score.of([sample.score - theirs[sample.task, sample.number] for sample in cell.samples])


def _section(cells: Sequence[Cell], setting: Setting) -> str:
    aligned = "contexts end where chunks do" if setting.aligned else "the end of a context stays raw"
    title = f"### {setting.suite}, {setting.context_tokens:,} tokens: {setting.model}"
    told = (
        f"{setting.samples} samples, seed {setting.seed}, {setting.dtype}, KV cache {setting.kv_cache_dtype}; "
        f"{aligned}. Score in percent ± standard error."
    )
    tables = [_scores(cells), _differences(cells), _parts(cells), _footprints(cells)]
    return "\n\n".join([title, told, *(table for table in tables if table)]) + "\n"


def _scores(cells: Sequence[Cell]) -> str:
    return _by_retention(cells, "method", lambda cell: percent(cell.score))


def _footprints(cells: Sequence[Cell]) -> str:
    shown = [cell for cell in cells if cell.footprint is not None]
    table = _by_retention(shown, "KV bytes held, of everything's", lambda cell: f"{cell.footprint:.3f}")
    return table if shown else ""


def _by_retention(cells: Sequence[Cell], corner: str, shown: Callable[[Cell], str]) -> str:
    """A line a method and scorer, a column a ρ."""
    columns = sorted({cell.method.kv_retention for cell in cells}, reverse=True)
    lines = [
        [name, scorer or _NONE, *(shown(own[column]) if column in own else _NONE for column in columns)]
        for (name, scorer), own in rows(cells).items()
    ]
    return _table([corner, "scorer", *(f"ρ {column:g}" for column in columns)], lines)


def _differences(cells: Sequence[Cell]) -> str:
    """A line for each pair of methods, of one scorer and, unless it is full, one ρ."""
    columns = sorted({cell.method.kv_retention for cell in cells if cell.method.name != "full"}, reverse=True)
    found = rows(cells)
    lines = []
    for first, second in _DIFFERENCES:
        for (name, scorer), own in found.items():
            for (other_name, other_scorer), theirs in found.items():
                if (_name(own), _name(theirs)) == (first, second) and other_scorer in ("", scorer):
                    shown = [_less(own, theirs, column) for column in columns]
                    lines.append([f"{name} − {other_name}", scorer, *shown])
    return _table(["difference", "scorer", *(f"ρ {column:g}" for column in columns)], lines) if lines else ""


def _less(own: dict[float, Cell], theirs: dict[float, Cell], retention: float) -> str:
    other = theirs.get(1.0, theirs.get(retention))
    return _NONE if retention not in own or other is None else percent(difference(own[retention], other), signed=True)


def _name(own: dict[float, Cell]) -> MethodName:
    return next(iter(own.values())).method.name


def _parts(cells: Sequence[Cell]) -> str:
    """A line a cell, a column a category of questions or, where there are none, a task; nothing for a single one."""
    found = {cell.method: _by_category(cell) or _by_task(cell) for cell in cells}
    parts = list(dict.fromkeys(part for means in found.values() for part in means))
    if len(parts) < 2:
        return ""
    lines = [
        [name, scorer or _NONE, f"{retention:g}", *(f"{100 * found[cell.method][part]:.1f}" for part in parts)]
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
        category: fmean(answer.score for answer in answers if answer.category == category) for category in categories
    }


def percent(score: Score, *, signed: bool = False) -> str:
    """ "63.2 ± 4.1", or "+1.5 ± 0.7"; without the error of a single sample."""
    mean = f"{100 * score.mean:+.1f}" if signed else f"{100 * score.mean:.1f}"
    return mean if score.stderr is None else f"{mean} ± {100 * score.stderr:.1f}"


def _where(cells: Sequence[Cell]) -> str:
    """On what, and with which versions, the cells were measured; more than once where it differs."""
    lines = []
    for cell in cells:
        where = cell.environment
        versions = ", ".join(f"{name} {where[name]}" for name in ("torch", "transformers") if name in where)
        lines.append(f"{where.get('gpu', where.get('cpu'))} · {versions} · {where.get('date')}, {where.get('commit')}")
    seconds = sum(cell.seconds for cell in cells)
    return f"{'; '.join(dict.fromkeys(lines))}. {len(cells)} cells, {seconds / 60:,.0f} minutes of asking.\n"


def _table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = ["---" if place < 2 else "---:" for place in range(len(header))]
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, rule, *lines])
