"""What `tangram calibrate` shows besides the profile: `--plot` and `--report`, from the same pass
over the scores.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tangram.cli.console import waiting
from tangram.cli.options import find_changed
from tangram.cli.serving import keep, positive
from tangram.compress.profile import Profile
from tangram.config import EngineConfig
from tangram.errors import ConfigError
from tangram.types import Float64

if TYPE_CHECKING:
    from tangram.calibrate.observations import Observations

Plot = Annotated[
    Path | None, typer.Option(help="draw each head's shares and its budget here (PNG)")
]
ReportFile = Annotated[
    Path | None, typer.Option(help="write here what this calibration is worth (.json or .md)")
]
AlsoAt = Annotated[
    str | None, typer.Option(help="more kv-retentions, comma-separated, for --plot and --report")
]


# Above the first, kinds of text that were measured lose under a point more by each other's budgets
# (docs/calibration.md); below the second, a mean ranks the heads of few texts.
_ALIKE, _MIXED = 0.8, 0.5


def meaning(profile: Profile) -> list[str]:
    """What a profile's figures say, a sentence each."""
    from tangram.calibrate.observations import reserved_fractions

    shares, stability = reserved_fractions(profile), profile.calibration.rank_stability
    said = [
        f"A sealed chunk keeps at most {profile.realised_retention:.1%} of its entries, the head "
        f"that needs least {shares.min():.0%}, the one that needs most {shares.max():.0%}."
    ]
    if stability is None:
        return [*said, "Whether texts agree on that is not known: it takes two that were measured."]
    ranked = (
        f"Texts rank the heads alike by {stability.mean:.2f} of 1, the least alike two by "
        f"{stability.min:.2f}: "
    )
    if stability.mean >= _ALIKE:
        return [*said, ranked + "the budgets serve texts that were not measured, too."]
    if stability.mean >= _MIXED:
        return [
            *said,
            ranked + "the budgets are a compromise. Calibrate on texts like yours (--data).",
        ]
    return [
        *said,
        ranked
        + "the budgets suit few of them. Calibrate on texts like yours (--data), and on more.",
    ]


def serve_line(config: EngineConfig, profile: Path) -> str:
    """The command that serves with what was calibrated."""
    words = [
        "tangram",
        "serve",
        config.model,
        "--kv-retention",
        f"{config.kv_retention:g}",
        "--profile",
        str(profile),
    ]
    names = (
        "chunk_tokens",
        "page_tokens",
        "heads_per_page",
        "gate",
        "dtype",
        "load_format",
        "device",
    )
    for name, value in find_changed(config, *names).items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(words)


@dataclass(frozen=True)
class Study:
    """What is to be shown of a calibration, and what it has let `observe` so far."""

    plot: Path | None
    report: Path | None
    also_at: tuple[float, ...]
    _shares: list[Float64] = field(default_factory=list)

    @classmethod
    def from_options(
        cls, plot: Path | None, report: Path | None, also_at: str | None, import_from: Path | None
    ) -> Study:
        """Raises `ConfigError` before any work for what could not be done after it."""
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
        """Every ρ to measure, `first` before the others."""
        return list(dict.fromkeys((first, *self.also_at)))

    def check(self, texts: int) -> None:
        """Raise `ConfigError` if a report is asked of so few texts that none could be left out."""
        if self.report is not None and texts < 2:
            raise ConfigError(
                f"report is {self.report}, it leaves samples out in turn: take at least 2 (samples "
                "is 1)"
            )

    def observe(self, shares: Float64) -> None:
        """Take in one sample's shares [ρ, chunks, L, H]."""
        self._shares.append(shares)

    def publish(
        self, profiles: Sequence[Profile], kinds: Sequence[str], source: str, config: EngineConfig
    ) -> None:
        """Draw and write what was asked for."""
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
            from tangram.cli.retention_plot import draw

            draw(evidence, title).savefig(self.plot, dpi=110)
        if self.report is not None:
            self._write(self.report, evidence, title, config)

    def _write(
        self, path: Path, evidence: Sequence[Observations], title: str, config: EngineConfig
    ) -> None:
        from tangram.lab.calibration.calibration_report import markdown, report
        from tangram.lab.environment import environment

        with waiting(f"Reckoning what is worth how much, for {path}"):  # half a minute for each ρ
            found = report(evidence)
        if path.suffix == ".json":
            keep(path, title, config, found)
            return
        where = environment()
        command = shlex.join(["tangram", *sys.argv[1:]])
        text = (
            f"# {title}\n\n{markdown(found)}\n`{command}` · {where['date']}, commit "
            f"{where['commit']}\n"
        )
        # Whatever the locale is; names of files may hold bytes that are no text.
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
