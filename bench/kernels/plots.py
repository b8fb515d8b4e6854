"""Plots of the results: speed-ups over FlashInfer per case, as bars in PNG files."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt

from bench.kernels.family import RESULTS
from bench.kernels.summary import BEST, by_group, device_us, names, ratios

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
FAMILIES = ("dense", "pat", "persistent", "ragged")
DECODE = "flashinfer decode"
PREFIX_PEERS = ("flashinfer cascade fa2", "fasttree", "vllm fa3")
COLOURS = ("#2b6cb0", "#dd8d29", "#4a9c6d", "#a1a1a1", "#8e5ea2")


def main(arguments: Sequence[str] | None = None) -> None:
    """Plot the results that exist; prints the files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--pictures", type=Path, default=PICTURES)
    options = parser.parse_args(arguments)
    mpl.use("Agg")
    options.pictures.mkdir(parents=True, exist_ok=True)
    for family in FAMILIES:
        source = options.results / f"kernels_{family}.json"
        if source.exists():
            target = options.pictures / f"kernels_{family}.png"
            draw(json.loads(source.read_text()), family, target)
            print(target)


def draw(result: dict[str, Any], family: str, target: Path) -> None:
    """One plot of a family: a panel per group (PAT), a bar per trace family, or one per case."""
    rows = [row for row in result["rows"] if names([row], ours=True)]
    if family == "persistent":
        figure = _persistent(rows)
    elif family == "pat":
        figure = _pat(rows)
    else:
        figure = _cases([row for row in rows if BEST in device_us(row)], BEST)
    figure.suptitle(
        f"{family}: times faster than FlashInfer, device time, cold L2 ({_where(result)})",
        fontsize=9,
    )
    figure.tight_layout()
    figure.savefig(target, dpi=150)
    plt.close(figure)


def _where(result: dict[str, Any]) -> str:
    found = result["environment"]
    library = found.get("flashinfer-python", "?")
    return (
        f"{found.get('gpu', 'CPU')}, FlashInfer {library}, {found['date']}, commit "
        f"{found['commit']}"
    )


def _pat(rows: list[dict[str, Any]]) -> Any:
    """A panel per head setting, a bar per tree: the first variant and other libraries' best over
    FlashInfer's decode.
    """
    settings = list(dict.fromkeys(row["labels"]["heads"] for row in rows))
    figure, axes = plt.subplots(
        len(settings), 1, figsize=(10, 2.6 * len(settings)), squeeze=False, sharex=True
    )
    for axis, setting in zip(axes[:, 0], settings, strict=True):
        chosen = [
            row for row in rows if row["labels"]["heads"] == setting and DECODE in device_us(row)
        ]
        first = names(chosen, ours=True)[:1]
        others = [name for name in names(chosen, ours=False) if name in PREFIX_PEERS]
        _bars(
            axis,
            [row["labels"]["config"] for row in chosen],
            _series(chosen, first + others, DECODE),
        )
        axis.set_ylabel(f"{setting} heads")
    return figure


def _cases(rows: list[dict[str, Any]], peer: str) -> Any:
    figure, axis = plt.subplots(figsize=(10, 4))
    _bars(axis, [row["case"] for row in rows], _series(rows, names(rows, ours=True), peer))
    return figure


def _series(rows: list[dict[str, Any]], contenders: list[str], peer: str) -> dict[str, list[float]]:
    """Per contender, the peer's time over its time in each row; 0 where it has none."""
    times = [device_us(row) for row in rows]
    return {
        name: [found[peer] / found[name] if name in found else 0.0 for found in times]
        for name in contenders
    }


def _persistent(rows: list[dict[str, Any]]) -> Any:
    """A bar per trace family: the mean over seeds, its standard deviation as a whisker."""
    groups, variants = by_group(rows), names(rows, ours=True)[:3]
    found = {
        v: [ratios(members, v, BEST) or [0.0] for members in groups.values()] for v in variants
    }
    series = {
        variant: [statistics.fmean(values) for values in lists] for variant, lists in found.items()
    }
    spread = {
        variant: [statistics.pstdev(values) for values in lists] for variant, lists in found.items()
    }
    figure, axis = plt.subplots(figsize=(10, 4))
    _bars(axis, list(groups), series, spread)
    return figure


def _bars(
    axis: Any,
    labels: list[str],
    series: dict[str, list[float]],
    spread: dict[str, list[float]] | None = None,
) -> None:
    width = 0.8 / max(1, len(series))
    for number, (name, values) in enumerate(series.items()):
        places = [index + number * width for index in range(len(labels))]
        whiskers = spread[name] if spread else None
        axis.bar(
            places,
            values,
            width,
            label=name,
            color=COLOURS[number % len(COLOURS)],
            yerr=whiskers,
            capsize=2,
        )
    axis.axhline(1.0, color="black", linewidth=0.8)
    axis.set_xticks(
        [index + 0.4 - width / 2 for index in range(len(labels))],
        labels,
        rotation=35,
        ha="right",
        fontsize=6,
    )
    axis.legend(fontsize=7)


if __name__ == "__main__":
    main()
