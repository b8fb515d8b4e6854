"""The plot of a soak: heap in use, resident memory, time to first token, pages, requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt

from bench.render.page import DOCS, RESULTS
from bench.stress.laws import SETTLING_SHARE

COLOURS = ("#2b6cb0", "#dd8d29", "#4a9c6d", "#a1a1a1")


def draw(result: dict[str, Any], target: Path) -> None:
    """Write a PNG of four panels over the same minutes."""
    mpl.use("Agg")
    samples = result["samples"]
    minutes = [sample["at_s"] / 60 for sample in samples]
    figure, (heap, resident, first, pages) = plt.subplots(4, 1, figsize=(8, 9), sharex=True)
    for panel, key, name in (
        (heap, "heap_mb", "heap in use, MB"),
        (resident, "rss_mb", "resident memory, MB"),
    ):
        panel.plot(minutes, [sample[key] for sample in samples], color=COLOURS[0], linewidth=1)
        panel.axvline(minutes[int(len(minutes) * SETTLING_SHARE)], color=COLOURS[3], linestyle=":")
        panel.set_ylabel(name)
        found = result[key]
        slope = f"{found['mb_per_hour']:.0f} ± {found['standard_error']:.0f} MB/hour"
        panel.set_title(
            f"least of nine stretches right of the dots: {slope}", fontsize=8, loc="right"
        )
    ttfts = result["ttfts"]
    first.scatter(
        [at_s / 60 for at_s, _ in ttfts], [ttft_s for _, ttft_s in ttfts], s=5, color=COLOURS[1]
    )
    first.axhline(result["ttft_s"]["p99"], color=COLOURS[3], linestyle=":")
    first.set_ylabel("time to first token, s")
    first.set_title(f"p99 {result['ttft_s']['p99']:.2f} s", fontsize=8, loc="right")
    states = ("held", "cached", "free")
    pages.stackplot(
        minutes,
        *([sample[state] for sample in samples] for state in states),
        labels=states,
        colors=COLOURS,
    )
    pages.set_ylabel("pages")
    pages.set_xlabel("minutes")
    pages.legend(loc="lower right", fontsize=8)
    where = result["environment"]
    figure.suptitle(
        f"{result['command']} · {where['cpu']} · {where['date']}, commit {where['commit']}",
        fontsize=9,
    )
    figure.tight_layout()
    figure.savefig(target, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    draw(json.loads((RESULTS / "http_soak.json").read_text()), DOCS / "pictures" / "http_soak.png")
