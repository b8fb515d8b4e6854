"""`tangram calibrate`: makes a profile of a model's heads, or trains a gate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from tangram.cli.checks import check_regular, check_start
from tangram.cli.console import tell
from tangram.cli.lab import find_in_lab
from tangram.cli.options import (
    CALIBRATION_PARAMETERS,
    CalibrationTexts,
    calibration_config,
    find_changed,
    take_options,
)
from tangram.cli.profile_meaning import meaning, serve_line
from tangram.compress.profile import Profile
from tangram.config import EngineConfig
from tangram.errors import ConfigError

Plot = Annotated[
    Path | None, typer.Option(help="plot each head's shares and its budget to this file (PNG)")
]
ReportFile = Annotated[
    Path | None,
    typer.Option(help="write the quality of this calibration to this file (.json or .md)"),
]
AlsoAt = Annotated[
    str | None, typer.Option(help="more retention ratios for --plot and --report, comma-separated")
]


@take_options((CALIBRATION_PARAMETERS, calibration_config))
def calibrate(
    config: EngineConfig,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="write the profile to this file")
    ] = None,
    calibration_samples: CalibrationTexts = None,
    data: Annotated[
        Path | None, typer.Option(help="file of texts to calibrate on (.jsonl, or plain text)")
    ] = None,
    import_from: Annotated[
        Path | None, typer.Option("--import", help="convert published budgets (.npz) to a profile")
    ] = None,
    train_gate: Annotated[
        Path | None,
        typer.Option(
            help="train a gate for the scorer fastkvzip instead, and write it to this file"
        ),
    ] = None,
    plot: Plot = None,
    report: ReportFile = None,
    also_at: AlsoAt = None,
) -> None:
    """Measure how much each head of MODEL needs and write a profile, or train a gate."""
    _refuse_ignored(config, calibration_samples, data, import_from, train_gate)
    if import_from is None:
        check_start(config)
    samples = 50 if calibration_samples is None else calibration_samples
    if train_gate is not None:
        others = {
            "--output": output,
            "--import": import_from,
            "--plot": plot,
            "--report": report,
            "--also-at": also_at,
        }
        _refuse_with_gate(config, others)
        train = find_in_lab("gate-training", "--train-gate")
        train(config, train_gate, _texts(config, samples, data), _source(config, data))
        return
    if output is None:
        raise ConfigError(
            "output is not set: give -o PROFILE.json, or --train-gate GATE.safetensors"
        )
    check_regular("output", output)
    study = _start_study(plot, report, also_at, import_from)
    profile = (
        _import(config, import_from) if import_from else _measure(config, samples, data, study)
    )
    profile.save(output)
    stability = profile.calibration.rank_stability
    agreement = (
        f", rank stability {stability.mean:.3f} (lowest {stability.min:.3f})" if stability else ""
    )
    tell(
        f"{output}: realised retention {profile.realised_retention:.4f} of "
        f"{profile.kv_retention}{agreement}"
    )
    for line in (*meaning(profile), "Serve with it:", serve_line(config, output)):
        tell(line)


def _refuse_ignored(
    config: EngineConfig,
    samples: int | None,
    data: Path | None,
    import_from: Path | None,
    train_gate: Path | None,
) -> None:
    """Raise `ConfigError` for options that others make useless, as `_refuse_with_gate` does."""
    if samples is not None and data is not None:
        raise ConfigError(
            f"calibration_samples is {samples} and data is {str(data)!r}: give one of them; "
            "calibration_samples is for the built-in texts"
        )
    if data is not None and train_gate is None and config.seed != EngineConfig.seed:
        raise ConfigError(
            f"seed is {config.seed}, but --data replaces the texts that it draws: leave it out"
        )
    if import_from is not None and train_gate is None:
        texts = {
            name: value
            for name, value in (("calibration_samples", samples), ("data", data))
            if value is not None
        }
        for name, value in (
            texts
            | find_changed(
                config, "dtype", "quantization", "load_format", "device", "threads", "seed"
            )
        ).items():
            raise ConfigError(
                f"{name} is {value}, but --import reads no text and loads no model: leave it out"
            )


def _refuse_with_gate(config: EngineConfig, options: Mapping[str, Path | str | None]) -> None:
    """Raise `ConfigError` for options of a profile, which the training of a gate would ignore."""
    given = [f"{name} {value}" for name, value in options.items() if value is not None]
    others = find_changed(
        config, "kv_retention", "scorer", "scope", "page_tokens", "heads_per_page", "gate"
    )
    given += [f"--{name.replace('_', '-')} {value}" for name, value in others.items()]
    if given:
        raise ConfigError(
            f"--train-gate was given together with {', '.join(given)}: leave that out, since a "
            "gate learns from KVzip; then make a profile with -o PROFILE --scorer fastkvzip "
            "--gate GATE"
        )


def _start_study(
    plot: Path | None, report: Path | None, also_at: str | None, import_from: Path | None
) -> Any | None:
    """The lab's study of a calibration, or None without an option that asks for it."""
    if (plot, report, also_at) == (None, None, None):
        return None
    study = find_in_lab("calibration-study", "--plot, --report and --also-at")
    return study.from_options(plot, report, also_at, import_from)


def _import(config: EngineConfig, path: Path) -> Profile:
    from tangram.calibrate.published_budgets import import_published
    from tangram.compress.scorers import choose_scorer, make_scorer
    from tangram.engine.setup.profiles import scorer_spec

    chosen = choose_scorer(config, None, {})
    scorer = make_scorer(chosen.scorer, gate=Path(config.gate) if config.gate else None)
    return import_published(
        path,
        config.model,
        scorer_spec(scorer),
        chosen.scope,
        config.kv_retention,
        chunk_tokens=config.chunk_tokens,
        page_tokens=config.page_tokens,
        heads_per_page=config.heads_per_page,
    )


def _measure(config: EngineConfig, samples: int, data: Path | None, study: Any | None) -> Profile:
    """The profile of `config`; `study` is that of `_start_study`."""
    from tangram.calibrate.text_files import read_kinds
    from tangram.calibrate.texts import list_kinds
    from tangram.engine.setup.option_checks import load_checked, longest_sequence
    from tangram.engine.setup.profiles import Compression, calibrate_model, check_chunk

    texts, source = _texts(config, samples, data), _source(config, data)
    retentions, observe = [config.kv_retention], None
    if study is not None:
        study.check(samples if data is None else len(texts()))
        retentions, observe = study.retentions(config.kv_retention), study.observe
    check_chunk(config, longest_sequence(config))
    loaded = load_checked(config)
    compression = Compression.of(config, loaded.fingerprint)
    config, scorer = compression.config, compression.make_scorer(loaded.fingerprint)
    profiles = calibrate_model(
        loaded,
        scorer,
        compression.choice.scope,
        config,
        retentions=retentions,
        texts=texts(),
        source=source,
        observe=observe,
    )
    if study is not None:
        study.publish(profiles, read_kinds(data) if data else list_kinds(samples), source, config)
    return profiles[0]


def _texts(config: EngineConfig, samples: int, data: Path | None) -> Callable[[], list[str]]:
    """The function that returns the texts.

    Texts of a file are read now. Built-in texts can be long, so they are generated only when the
    model accepts the chunk size.
    """
    from tangram.calibrate.text_files import read_texts
    from tangram.calibrate.texts import make_texts

    if data:
        found = read_texts(data)
        return lambda: found
    characters = max(8_000, 6 * config.chunk_tokens)
    return lambda: make_texts(samples, config.seed, min_characters=characters)


def _source(config: EngineConfig, data: Path | None) -> str:
    return str(data) if data else f"built-in calibration texts, seed {config.seed}"
