"""The `tangram` command: serve, chat, generate, calibrate, eval, size, bench. A file each."""

from __future__ import annotations

import typer

from tangram.cli import ablation, bench, calibrate, chat, evaluate, generate, serve, serving, size

app = typer.Typer(help=__doc__, no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)
serving.commands.command()(ablation.ablation)
bench.commands.add_typer(serving.commands, name="serving")
app.command()(serve.serve)
app.command()(chat.chat)
app.command()(generate.generate)
app.command()(calibrate.calibrate)
app.command("eval")(evaluate.evaluate)
app.command()(size.size)
app.add_typer(bench.commands, name="bench")


def main() -> None:
    """The entry point of the `tangram` command."""
    app()
