"""The plot of a run: scores against ρ, a line for each method, a panel for each suite."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from tangram.errors import ConfigError
from tangram_lab.accuracy.passages import SUITE as FIDELITY
from tangram_lab.accuracy.results import AnyCell, FidelityCell, Score
from tangram_lab.accuracy.score_report import rows

_PANEL_INCHES = (4.5, 3.5)


def check_plot(path: Path) -> None:
    """Raise `ConfigError` if no plot can be written to `path`."""
    if find_spec("matplotlib") is None:
        raise ConfigError(f"plot is {path}, drawing needs matplotlib: pip install matplotlib")
    from matplotlib.figure import Figure

    known = Figure().canvas.get_supported_filetypes()
    if path.suffix.lower().removeprefix(".") not in known:
        raise ConfigError(f"plot is {path}, it must end in .png")


def plot_scores(cells: Sequence[AnyCell], path: Path) -> None:
    """Plot the cells with standard errors as a PNG: scores, and the divergence of fidelity.

    `full` is a horizontal line. Raises `ConfigError` if no cell has a scorer.
    """
    from matplotlib.figure import Figure

    settings = list(dict.fromkeys(cell.setting for cell in cells))
    scorers = list(
        dict.fromkeys(cell.method.scorer for cell in cells if cell.method.scorer is not None)
    )
    if not scorers:
        raise ConfigError(
            f"plot is {path}, but no method compresses: there is nothing to draw against ρ"
        )
    width, height = _PANEL_INCHES
    picture = Figure(figsize=(width * len(scorers), height * len(settings)), layout="constrained")
    panels = picture.subplots(len(settings), len(scorers), sharey="row", squeeze=False)
    for line, setting in zip(panels, settings, strict=True):
        for axes, scorer in zip(line, scorers, strict=True):
            for (name, of_scorer), own in rows(
                cell for cell in cells if cell.setting == setting
            ).items():
                if of_scorer == "":
                    axes.axhline(_height(own[1.0]).mean, color="black", linestyle="--", label=name)
                elif of_scorer == scorer:
                    means = [_height(cell).mean for cell in own.values()]
                    errors = [_height(cell).stderr or 0.0 for cell in own.values()]
                    axes.errorbar(list(own), means, errors, marker="o", capsize=3, label=name)
            what = "KL from full, nats" if setting.suite == FIDELITY else "score, %"
            axes.set(
                xlabel="ρ",
                ylabel=what,
                title=f"{setting.suite}, {setting.context_tokens:,}: {scorer}",
            )
            axes.grid(alpha=0.3)
            axes.legend(fontsize=8)
    picture.savefig(path, dpi=130)


def _height(cell: AnyCell) -> Score:
    """The unit: percent, or nats."""
    if isinstance(cell, FidelityCell):
        return cell.divergence
    error = None if cell.score.stderr is None else 100 * cell.score.stderr
    return Score(mean=100 * cell.score.mean, stderr=error, samples=cell.score.samples)
