"""Tangram serves language models with a KV cache that each attention head compresses.

Requests share the cached KV state of common prefixes.
"""

from __future__ import annotations

from typing import Annotated

import typer

from tangram.cli import calibrate, chat, deploy, generate, lab, replay, serve, size
from tangram.cli.command import Command, CommandGroup, rename_options
from tangram.version import __version__

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},  # also for all commands
)
app.command(cls=Command)(serve.serve)
app.command(cls=Command)(deploy.deploy)
app.command(cls=Command)(chat.chat)
app.command(cls=Command)(generate.generate)
app.command(cls=Command, context_settings=rename_options(samples="calibration-samples"))(
    calibrate.calibrate
)
app.command("eval", cls=lab.LabCommand)(lab.evaluate)
app.command(cls=Command, context_settings=rename_options(context="context-tokens"))(size.size)
app.command("bench", cls=lab.LabCommand)(lab.bench)
app.command(cls=Command)(replay.replay)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"tangram {__version__}")
        raise typer.Exit


@app.callback(help=__doc__)
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="print the version and exit"
        ),
    ] = False,
) -> None:
    """The options of `tangram` without a command. Their callbacks have run by now."""


def main() -> None:
    """Run the command line; `tangram.__main__` handles streams and Ctrl-C."""
    app()
