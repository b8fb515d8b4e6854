"""The quality of a calibration, in figures (JSON) and in tables (Markdown)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tangram.calibrate.observations import Observations
from tangram.compress.profile import PAPER_ALPHA
from tangram_lab.calibration.enough import samples_needed
from tangram_lab.calibration.kinds import correlate_kinds, measure_agreement
from tangram_lab.calibration.lost_entries import measure_held_out_overflow, transfer

Report = dict[str, Any]
Row = list[str]

_BUDGETS = {
    "uniform": "the same for every head",
    "own": "of the sample itself",
    "fitted": "that lose least on the other samples",
    "unscaled": f"min(1, μ + {PAPER_ALPHA:g}·σ) in whole pages, not scaled to ρ",
}


def report(evidence: Sequence[Observations]) -> Report:
    """The figures of one calibration for JSON.

    `evidence` has one entry per ρ, over the same samples. Keys say how much was measured:
    `samples`, `kinds`, `chunks`, `heads`, `page_tokens`, `heads_per_page`, `alpha`. Each of
    `retentions` has the results of `agreement`, `kind_correlations`, `samples_needed`,
    `held_out_overflow` and `transfer`, at the profile's α and at the paper's. Raises `ConfigError`
    for fewer than two samples.
    """
    first = evidence[0]
    return {
        "samples": len(first.kinds),
        "kinds": dict(Counter(first.kinds)),
        "chunks": sum(len(wishes) for wishes in first.wishes),
        "heads": first.profile.budgets.size,
        "chunk_tokens": first.profile.chunk_tokens,
        "page_tokens": first.profile.page_tokens,
        "heads_per_page": first.profile.heads_per_page,
        "alpha": first.profile.alpha,
        "retentions": {f"{entry.profile.kv_retention:g}": _figures(entry) for entry in evidence},
    }


def _figures(entry: Observations) -> dict[str, Any]:
    return {
        "overflow": measure_held_out_overflow(entry),  # first, since it raises for too few samples
        "realised_retention": entry.profile.realised_retention,
        "agreement": {
            name: asdict(pairs)
            for name, pairs in measure_agreement(entry.fractions, entry.kinds).items()
        },
        "kind_correlations": correlate_kinds(entry.fractions, entry.kinds),
        "samples_needed": {str(size): figures for size, figures in samples_needed(entry).items()},
        "transfer": {
            f"alpha {alpha:g}": transfer(entry, alpha)
            for alpha in dict.fromkeys((entry.profile.alpha, PAPER_ALPHA))
        },
    }


def markdown(found: Report) -> str:
    """The tables of a report, under a heading for each ρ."""
    kinds = ", ".join(f"{count} {kind}" for kind, count in found["kinds"].items())
    parts = [
        f"{found['samples']} samples ({kinds}), {found['chunks']} chunks of "
        f"{found['chunk_tokens']} tokens, {found['heads']} heads, α {found['alpha']:g}"
    ]
    for retention, figures in found["retentions"].items():
        parts.append(f"## ρ {retention}")
        for title, rows in _tables(figures):
            parts += [f"**{title}**", table(rows)]
    return "\n\n".join(parts) + "\n"


def table(rows: Sequence[Row]) -> str:
    """A table in Markdown; the first row is its head."""
    lines = [rows[0], ["---", *(["---:"] * (len(rows[0]) - 1))], *rows[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _tables(figures: Mapping[str, Any]) -> Iterator[tuple[str, list[Row]]]:
    yield ("Held-out overflow: entries beyond fixed budgets", overflow_rows(figures["overflow"]))
    if figures["samples_needed"]:
        yield (
            "Fewer samples against all: median (5th–95th percentile)",
            samples_rows(figures["samples_needed"]),
        )
    if figures["agreement"]:
        yield (
            "Spearman's correlation of heads over pairs of samples",
            agreement_rows(figures["agreement"]),
        )
    if len(figures["kind_correlations"]) > 1:
        yield (
            "Spearman's correlation of heads between kinds",
            matrix_rows(figures["kind_correlations"], "{:.3f}".format),
        )
    for alpha, losses in figures["transfer"].items():
        if losses:
            title = f"Entries lost, made of (row), served (column), {alpha.replace('alpha', 'α')}"
            yield title, matrix_rows(losses, "{:.1%}".format)


def budget_name(way: str) -> str:
    """A key of `held_out_overflow` in words."""
    return _BUDGETS.get(way, f"of the other samples, α {way.removeprefix('alpha ')}")


def overflow_rows(found: Mapping[str, Mapping[str, float]]) -> list[Row]:
    """A row for each kind of budget."""
    head = [
        "budgets",
        "reserved",
        "wishes above their budget",
        "entries lost",
        "5th–95th percentile of samples",
    ]
    return [head] + [
        [
            budget_name(name),
            f"{figures['footprint']:.3f}",
            f"{figures['exceeded']:.1%}",
            f"{figures['lost']:.2%}",
            f"{figures['lost_p5']:.1%}–{figures['lost_p95']:.1%}",
        ]
        for name, figures in found.items()
    ]


def samples_rows(found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[Row]:
    """A row for each number of samples."""
    columns: dict[str, tuple[str, Callable[[float], str]]] = {
        "mean": ("mean difference of μ", "{:.4f}".format),
        "budget": ("of B", "{:.4f}".format),
        "rank": ("rank correlation", "{:.3f}".format),
        "pages": ("pages that move", "{:.1%}".format),
        "lost": ("entries lost, held out", "{:.2%}".format),
    }
    return [["samples", *(title for title, _ in columns.values())]] + [
        [size, *(_spread(figures.get(name), write) for name, (_, write) in columns.items())]
        for size, figures in found.items()
    ]


def agreement_rows(found: Mapping[str, Mapping[str, float]]) -> list[Row]:
    """A row for each kind of pair."""
    return [["pairs of samples", "mean", "least"]] + [
        [f"of {name}", f"{pairs['mean']:.3f}", f"{pairs['min']:.3f}"]
        for name, pairs in found.items()
    ]


def matrix_rows(
    found: Mapping[str, Mapping[str, float]], write: Callable[[float], str]
) -> list[Row]:
    """A row for each outer key, a column for each inner one."""
    columns = list(dict.fromkeys(name for row in found.values() for name in row))
    return [["", *columns]] + [
        [name, *(write(row[column]) if column in row else "–" for column in columns)]
        for name, row in found.items()
    ]


def _spread(found: Mapping[str, float] | None, write: Callable[[float], str]) -> str:
    return (
        "–"
        if found is None
        else f"{write(found['median'])} ({write(found['p5'])}–{write(found['p95'])})"
    )
