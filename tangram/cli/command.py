"""The classes of all commands and groups of `tangram`.

They check values before any work, explain options of other engines, and print errors in one line.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from reprlib import repr as shortened
from typing import Any

import typer
from pydantic import ValidationError
from typer import TyperException
from typer.core import TyperCommand, TyperGroup, TyperOption

from tangram.cli.checks import as_texts, check_outputs
from tangram.cli.console import is_wrapped, tell_error
from tangram.cli.foreign import explain
from tangram.errors import EngineError, TangramError

_OURS = "value_error"  # raised by checks of ours, whose texts name the value


class Command(TyperCommand):
    """A command that accepts `--x` for `--no-x`, and explains options of other engines."""

    def make_parser(self, ctx: Any) -> Any:
        """Typer's parser, plus the positive names of flags that have only a negative name.

        A name that another option has is left to that: `--page` beside `--no-page`.
        """
        parser = super().make_parser(ctx)
        taken = {name for param in self.params for name in param.opts}
        for param in (param for param in self.params if isinstance(param, TyperOption)):
            for name in set(_positive(param)) - taken:
                parser.add_option(param, [name], param.name, action="store_const", const=False)
        return parser

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Typer's parsing, plus a check of values and an explanation of other engines' options."""
        with _report_errors(), _explain_foreign_options(args, self.params):
            rest = super().parse_args(ctx, args)
            if not ctx.resilient_parsing:  # for shell completion
                ctx.params = as_texts(ctx.params)
                check_outputs(ctx.params)
            return rest

    def invoke(self, ctx: Any) -> Any:
        """Typer's invocation; errors become a line and an exit code."""
        with _report_errors():
            return super().invoke(ctx)


class CommandGroup(TyperGroup):
    """A group that explains options of other engines before a command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Typer's parsing, plus the explanation of other engines' options."""
        with _report_errors(), _explain_foreign_options(args, self.params):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Typer's invocation; an unknown command becomes one line."""
        with _report_errors():
            return super().invoke(ctx)


def exit_code(error: TangramError) -> int:
    """1 if another start may succeed, else 2."""
    return 1 if isinstance(error, EngineError) else 2


def rename_options(**names: str) -> dict[str, Any]:
    """Context settings that accept former names of options: `old_name="new-name"`."""
    new = {old.replace("_", "-"): name for old, name in names.items()}
    return {"token_normalize_func": lambda name: new.get(name, name)}


@contextmanager
def _report_errors() -> Iterator[None]:
    """Turn errors inside into a line on standard error and an exit code; bugs remain tracebacks."""
    try:
        yield
    except TangramError as error:
        tell_error(error)
        raise typer.Exit(exit_code(error)) from error
    except TyperException as error:
        _name_value(error)
        if is_wrapped() or not error.message:
            raise  # Typer draws a box around it; without a message the help has been shown
        tell_error(error.format_message())
        raise typer.Exit(error.exit_code) from error
    except OSError as error:
        if error.filename is None or error.errno == errno.EPIPE:
            raise
        tell_error(f"{error.filename}: {error.strerror}")
        raise typer.Exit(2) from error


def _name_value(error: TyperException) -> None:
    """Add the value to what a library says of one of the wrong kind."""
    if isinstance(fault := error.__context__, ValidationError):
        first = fault.errors()[0]
        if first["type"] != _OURS:
            error.message = f"{shortened(first['input'])}: {first['msg']}"


@contextmanager
def _explain_foreign_options(args: list[str], params: Iterable[Any]) -> Iterator[None]:
    """Add the explanation to errors about options of other engines; leave others unchanged."""
    given = [arg.partition("=")[0] for arg in args]  # Typer empties the list
    try:
        yield
    except TyperException as error:
        ours = [name for param in params for name in _names(param)]
        named = getattr(error, "option_name", None)  # of an option that there is not
        meant = (arg for arg in given if arg not in ours and named and _is_meant(arg, named))
        if (message := next(filter(None, (explain(arg, ours) for arg in meant)), None)) is not None:
            vars(error).update(message=message, possibilities=None)
        raise


def _names(param: Any) -> list[str]:
    return [*param.opts, *param.secondary_opts, *_positive(param)]


def _positive(param: Any) -> list[str]:
    return [name.replace("--no-", "--", 1) for name in param.opts if name.startswith("--no-")]


def _is_meant(arg: str, option_name: str) -> bool:
    """Whether Typer's error is about `arg`. For `-ngl` it names the first unknown letter."""
    return arg == option_name or (arg[:1] == "-" != arg[1:2] and option_name[1:] in arg[1:])
