"""`tangram calibrate --train-gate`: trains a gate for the scorer fastkvzip."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.table import Table

from tangram.cli.checks import check_regular
from tangram.cli.console import messages, tell
from tangram.cli.options import find_changed
from tangram.config import EngineConfig
from tangram.errors import ConfigError


def refuse_with_gate(config: EngineConfig, options: Mapping[str, Path | str | None]) -> None:
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


def train_and_report(
    config: EngineConfig, path: Path, texts: Callable[[], Sequence[str]], source: str
) -> None:
    """Train a gate on `texts` and write it to `path`.

    Then print how far it agrees with KVzip on texts that were not used for training.
    """
    from tangram.compress.scorers.gate import check_path, save_gate
    from tangram.engine.option_checks import load_checked, longest_sequence
    from tangram.engine.profiles import check_chunk
    from tangram.gate_training.fit import Recipe
    from tangram.gate_training.text_training import agreements, train_gate_on_texts
    from tangram.kernels.threads import use_threads

    check_regular("train_gate", path)
    check_path(path)
    use_threads(config.threads)
    check_chunk(config, longest_sequence(config))
    loaded = load_checked(config)
    recipe = Recipe(seed=config.seed)
    gate, unseen = train_gate_on_texts(
        loaded, texts(), chunk_tokens=config.chunk_tokens, source=source, recipe=recipe
    )
    save_gate(path, gate)
    table = Table(
        "ρ",
        "what competes",
        "gate",
        "keydiff",
        title=f"Kept as KVzip would, in {len(unseen)} unseen texts",
    )
    for found in agreements(loaded, gate, unseen, chunk_tokens=config.chunk_tokens):
        competing = "entries of the model" if found.scope else "entries of a head"
        table.add_row(str(found.retention), competing, f"{found.gate:.3f}", f"{found.keydiff:.3f}")
    tell(f"{path}: the gate is written")
    messages().print(table)
