"""Tangram serves language models with a KV cache compressed head by head and reused between turns."""

from __future__ import annotations

import typer

from tangram.cli import ablation, bench, calibrate, chat, evaluate, generate, serve, serving, size
from tangram.cli.command import Command, Group, renamed

app = typer.Typer(cls=Group, help=__doc__, no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)
ablation_settings = renamed(batch="batch-requests")
serving.commands.command(cls=Command, context_settings=ablation_settings)(ablation.ablation)
bench.commands.add_typer(serving.commands, name="serving")
app.command(cls=Command)(serve.serve)
app.command(cls=Command)(chat.chat)
app.command(cls=Command)(generate.generate)
app.command(cls=Command, context_settings=renamed(samples="calibration-samples"))(calibrate.calibrate)
app.command("eval", cls=Command, context_settings=evaluate.RENAMED)(evaluate.evaluate)
app.command(cls=Command, context_settings=renamed(context="context-tokens"))(size.size)
app.add_typer(bench.commands, name="bench")


def main() -> None:
    """The entry point of the `tangram` command."""
    app()
