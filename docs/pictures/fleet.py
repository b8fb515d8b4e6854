"""The picture of routing over simulated replicas, from `bench/results/fleet_trace.json`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from sheet import INK, PAPER, SOFT

RESULTS = Path(__file__).parents[2] / "bench" / "results" / "fleet_trace.json"
LINES = {
    "ideal": ("one infinite cache", "#8a96a3", ":"),
    "routing": ("Tangram", "#c8771c", "-"),
    "no-reports": ("Tangram, no reports", "#f0b56d", "-"),
    "hash-second": ("hash of the second chunk", "#3b74b8", "-"),
    "least-loaded": ("least loaded", "#4f9d69", "-"),
    "round-robin": ("round robin", "#8e6bb0", "-"),
    "hash-first": ("hash of the first chunk", "#7fb0e6", "--"),
}


def draw_fleet() -> None:
    """Hits, first tokens and balance by the size of the fleet, a line for each balancer."""
    runs = json.loads(RESULTS.read_text())["runs"]
    figure, axes = plt.subplots(1, 3, figsize=(11.4, 3.6), facecolor=PAPER)
    _draw(axes[0], runs, "hits, share of the ideal", lambda run: run["of_ideal"])
    _draw(axes[1], runs, "first token, p90 in s", lambda run: run["ttft_s"]["p90"])
    _draw(
        axes[2],
        [run for run in runs if run["balancer"] != "ideal"],
        "tokens computed, most / mean",
        lambda run: run["most_over_mean"]["computed_tokens"],
    )
    axes[1].set_yscale("log")
    axes[2].set_yscale("log")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=4, frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0.15, 1, 1))


def _draw(
    ax: Axes, runs: list[dict[str, Any]], title: str, read: Callable[[dict[str, Any]], float]
) -> None:
    for name, (label, colour, style) in LINES.items():
        own = [run for run in runs if run["balancer"] == name]
        if own:
            sizes = [run["replicas"] for run in own]
            ax.plot(sizes, [read(run) for run in own], style, color=colour, label=label, marker=".")
    ax.set_xscale("log", base=4)
    ax.set_xticks(sorted({run["replicas"] for run in runs}), minor=False)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.set_title(title, color=INK, size=11)
    ax.set_xlabel("replicas", color=SOFT)
    ax.tick_params(colors=SOFT)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
