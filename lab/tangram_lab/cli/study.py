"""`--plot` and `--report` of `tangram calibrate`, from the same pass over the scores."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tangram.cli.console import waiting
from tangram.compress.profile import Profile
from tangram.config import EngineConfig
from tangram.errors import ConfigError
from tangram.types import Float64
from tangram_lab.cli.serving import positive, write_figures

if TYPE_CHECKING:
    from tangram.calibrate.observations import Observations


@dataclass(frozen=True)
class Study:
    """The requested plot and report, and the shares that `observe` has collected so far."""

    plot: Path | None
    report: Path | None
    also_at: tuple[float, ...]
    _shares: list[Float64] = field(default_factory=list)

    @classmethod
    def from_options(
        cls, plot: Path | None, report: Path | None, also_at: str | None, import_from: Path | None
    ) -> Study:
        """Raises `ConfigError` before any work if the plot or report could not be written."""
        if plot is not None and find_spec("matplotlib") is None:
            raise ConfigError(f"plot is {plot}, drawing needs matplotlib: pip install matplotlib")
        if plot is not None and plot.suffix != ".png":
            raise ConfigError(
                f"plot is {plot}, the picture is a PNG: give a name that ends in .png"
            )
        if report is not None and report.suffix not in (".json", ".md"):
            raise ConfigError(f"report is {report}, it must end in .json or .md")
        for name, path in (("plot", plot), ("report", report)):
            if path is not None and import_from is not None:
                raise ConfigError(
                    f"{name} is {path}, imported budgets hold no samples: leave it out or --import"
                )
        if also_at is not None and plot is None and report is None:
            raise ConfigError(
                f"also_at is {also_at}, it is for --plot and --report: give one of them or leave "
                "it out"
            )
        ratios = (
            [] if also_at is None else [positive("also_at", text) for text in also_at.split(",")]
        )
        if over := [ratio for ratio in ratios if ratio >= 1.0]:
            raise ConfigError(
                f"also_at has {over[0]}, each must be less than 1: 1.0 keeps everything"
            )
        return cls(plot, report, tuple(ratios))

    def retentions(self, first: float) -> list[float]:
        """All retention ratios to measure, `first` first."""
        return list(dict.fromkeys((first, *self.also_at)))

    def check(self, texts: int) -> None:
        """Raise `ConfigError` if there are too few texts for a report, which leaves some out."""
        if self.report is not None and texts < 2:
            raise ConfigError(
                f"report is {self.report}, it leaves samples out in turn: take at least 2 (samples "
                "is 1)"
            )

    def observe(self, shares: Float64) -> None:
        """Add the shares of one sample, [ρ, chunks, L, H]."""
        self._shares.append(shares)

    def publish(
        self, profiles: Sequence[Profile], kinds: Sequence[str], source: str, config: EngineConfig
    ) -> None:
        """Write the plot and the report, if they were requested."""
        from tangram.calibrate.observations import Observations

        if self.plot is None and self.report is None:
            return
        evidence = Observations.gather(profiles, self._shares, kinds)
        first = profiles[0]
        title = (
            f"{first.model.name.rsplit('/', 1)[-1]}, {first.scorer.name}, scope {first.scope}: "
            f"{source}"
        )
        if self.plot is not None:
            from tangram_lab.cli.retention_plot import plot_retention

            plot_retention(evidence, title).savefig(self.plot, dpi=110)
        if self.report is not None:
            self._write(self.report, evidence, title, config)

    def _write(
        self, path: Path, evidence: Sequence[Observations], title: str, config: EngineConfig
    ) -> None:
        from tangram_lab.calibration.calibration_report import markdown, report
        from tangram_lab.environment import environment

        with waiting(f"Computing the report {path}"):  # half a minute for each ρ
            found = report(evidence)
        if path.suffix == ".json":
            write_figures(path, title, config, found)
            return
        where = environment()
        command = shlex.join(["tangram", *sys.argv[1:]])
        text = (
            f"# {title}\n\n{markdown(found)}\n`{command}` · {where['date']}, commit "
            f"{where['commit']}\n"
        )
        # UTF-8 in any locale; names of files may hold bytes that are no text.
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
