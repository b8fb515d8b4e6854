"""The `tangram` command: serve, chat, generate, calibrate, eval, size, bench. A file each."""

from __future__ import annotations

from typing import Annotated

import typer

from tangram.cli import ablation, bench, calibrate, chat, evaluate, generate, serve, serving, size
from tangram.version import __version__

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},  # of the commands below, too
)
serving.commands.command()(ablation.ablation)
bench.commands.add_typer(serving.commands, name="serving")
app.command()(serve.serve)
app.command()(chat.chat)
app.command()(generate.generate)
app.command()(calibrate.calibrate)
app.command("eval")(evaluate.evaluate)
app.command()(size.size)
app.add_typer(bench.commands, name="bench")


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"tangram {__version__}")
        raise typer.Exit


@app.callback(help=__doc__)
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    """What `tangram` knows before a command; the callback has answered by then."""


def main() -> None:
    """The entry point of the `tangram` command."""
    app()
