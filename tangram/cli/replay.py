"""`tangram replay`: compute a pass that has failed once more, on the reference kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from tangram.cli.console import output, tell

File = Annotated[Path, typer.Argument(help="a file that --save-failed-passes has made")]
ModelPath = Annotated[
    str | None, typer.Argument(help="where the model lies, if not where it was served from")
]
LEAST_GIB = 4.0


def replay(file: File, model_path: ModelPath = None) -> None:
    """Compute a failed pass again on the CPU, and say where numbers first are not finite."""
    from tangram.engine.passes.saved_pass import load_pass
    from tangram.engine.replay import replay as compute
    from tangram.engine.replay import replay_config
    from tangram.engine.setup.option_checks import load_checked

    saved = load_pass(file)
    room_gib = max(LEAST_GIB, 1.2 * saved.pages.numel() * saved.pages.itemsize / 2**30)
    model = model_path or saved.config.model
    config = replay_config(saved, model=model, device="cpu", kv_cache_gib=room_gib)
    loaded = load_checked(config)
    found = compute(saved, config, loaded)
    tell(f"It failed with: {saved.error}")
    table = Table(title=f"{len(found.rows)} rows of {model} on the reference kernels")
    for column in ("request", "row", "position", "tokens", "next token"):
        table.add_column(column)
    for row in found.rows:
        token = row.next_token
        shown = "NaN" if token is None else f"{token} {loaded.tokenizer.decode([token])!r}"
        table.add_row(row.request_id, row.kind, str(row.start), str(row.tokens), shown)
    output().print(table)
    if found.unsound is not None:
        tell(f"Not finite first in {found.unsound}.")
    elif all(row.next_token is not None for row in found.rows):
        tell("All numbers are finite here: the kernels or the device that served are at fault.")
