"""`tangram generate --batch`: answers to a file of requests, with a progress bar."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import typer

from tangram.cli.checks import check_regular
from tangram.cli.console import progress, tell
from tangram.config import EngineConfig
from tangram.errors import ConfigError
from tangram.model.source import name_served_model


def answer_batch(
    config: EngineConfig, source: Path, target: Path | None, others: Mapping[str, object]
) -> None:
    """Answer the requests of `source` into `target`; exit with 1 if a line got an error.

    Raises `ConfigError` if one of the `others` is set too.
    """
    for name, value in others.items():
        if value is not None:
            raise ConfigError(
                f"{name} is {value!r}, with --batch each line has its own: leave it out"
            )
    if target is None:
        raise ConfigError("output is not set: --batch needs -o OUT.jsonl for the answers")
    check_regular("output", target)
    if not source.is_file():
        raise ConfigError(f"batch is {str(source)!r}, there is no such file")
    from tangram.engine.build import build_engine
    from tangram.link.linked_engine import LinkedEngine
    from tangram.serve.batch import BatchFiles, answer_all
    from tangram.serve.service import Service

    files = BatchFiles(source, target)
    with files.output:
        engine = LinkedEngine(build_engine(config))
        service = Service(engine, name_served_model(config.model))
        with progress() as bar:
            task = bar.add_task("Answering", total=files.total, completed=files.skipped)
            # Twice as many as can run at once, so that one always waits.
            failed = answer_all(
                service, files, at_once=2 * config.max_num_seqs, on_line=lambda: bar.advance(task)
            )
    answered = files.total - files.skipped - failed
    tell(f"{target}: {answered} answered, {failed} with errors, {files.skipped} skipped")
    if failed:
        raise typer.Exit(1)
