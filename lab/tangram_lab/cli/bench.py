"""`tangram bench`: measure this machine."""

from __future__ import annotations

import typer

from tangram.cli.command import CommandGroup

commands = typer.Typer(cls=CommandGroup, help="Measure this machine.", no_args_is_help=True)
