"""Commands and options that measure and compare: their code is in the package tangram-lab."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import typer
from typer.core import TyperCommand

from tangram.errors import ConfigError


def find_in_lab(name: str, asked: str) -> Any:
    """What the lab enters under `name` in the group `tangram.commands`.

    Raises `ConfigError` without the lab, saying that `asked` needs it.
    """
    from importlib.metadata import entry_points  # 0.1 s that no other command pays

    for found in entry_points(group="tangram.commands", name=name):
        try:
            return found.load()
        except ImportError as error:
            raise ConfigError(
                f"{asked} is in tangram-lab, which does not fit this Tangram ({error}): install "
                "both from one clone, pip install . ./lab"
            ) from error
    raise ConfigError(
        f"{asked} needs tangram-lab, a package beside this one: pip install ./lab in a clone"
    )


class LabCommand(TyperCommand):
    """A command in the list of commands, for a command of the lab, imported when it is called."""

    @cached_property
    def inner(self) -> Any:
        """The command itself, with its options. Raises `ConfigError` without the lab."""
        app = typer.main.get_command(find_in_lab(str(self.name), f"tangram {self.name}"))
        return app.commands[self.name]  # type: ignore[attr-defined]

    def make_context(self, *arguments: Any, **extra: Any) -> Any:
        """The context of the lab's command, which is the one that is run.

        Without the lab a shell that completes a line is given nothing.
        """
        try:
            command = self.inner
        except ConfigError:
            if not extra.get("resilient_parsing"):
                raise
            return super().make_context(*arguments, **extra)
        return command.make_context(*arguments, **extra)


def evaluate() -> None:
    """Ask MODEL the questions of suites with each compression method, and grade its replies."""


def bench() -> None:
    """Measure this machine."""
