"""`tangram calibrate --train-gate`: trains a gate for the scorer fastkvzip."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rich.table import Table

from tangram.cli.checks import check_regular
from tangram.cli.console import messages, tell
from tangram.config import EngineConfig


def train_and_report(
    config: EngineConfig, path: Path, texts: Callable[[], Sequence[str]], source: str
) -> None:
    """Train a gate on `texts` and write it to `path`.

    Then print how far it agrees with KVzip on texts that were not used for training.
    """
    from tangram.compress.scorers.gate import check_path, save_gate
    from tangram.engine.setup.option_checks import load_checked, longest_sequence
    from tangram.engine.setup.profiles import check_chunk
    from tangram.kernels.cpu.threads import use_threads
    from tangram_lab.gate_training.fit import Recipe
    from tangram_lab.gate_training.text_training import agreements, train_gate_on_texts

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
