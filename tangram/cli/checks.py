"""What a command can see without torch, whose import takes seconds: said before them, in a line."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import typer

from tangram.cli.console import tell_error
from tangram.config import EngineConfig, cache_folder
from tangram.errors import ConfigError
from tangram.foreign_files import expand_home, is_text
from tangram.limits import Bounds
from tangram.model.source import check_source

OUTPUTS = ("output", "report", "plot", "train_gate")  # the options that name a file to write
_NAMES = ("model", "profile", "gate", "decode_policy")  # files, but not always: they are texts


def within(bounds: Bounds, hint: str = "") -> Callable[[typer.CallbackParam, Any], Any]:
    """A callback of an option: its number must lie there. Raises `ConfigError`."""

    def check(parameter: typer.CallbackParam, value: float | None) -> float | None:
        if value is not None:
            bounds.check_option(str(parameter.name), value, hint)
        return value

    return check


def as_texts(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same options, whose texts are UTF-8 whatever the locale took their bytes for.

    Raises `ConfigError` for a text that is none. Paths stay as they are.
    """
    return {
        name: [as_text(name, part) for part in value]
        if isinstance(value, list | tuple)  # of an option that may be given again
        else as_text(name, value)
        for name, value in values.items()
    }


def as_text(name: str, value: Any) -> Any:
    """A text as UTF-8, anything else as it is. Raises `ConfigError` for bytes that are no UTF-8."""
    if not isinstance(value, str) or is_text(value):
        return value
    try:
        return os.fsencode(value).decode()
    except UnicodeError as error:
        raise ConfigError(
            f"{name} is no text, it has bytes that are not UTF-8: give one"
        ) from error


def check_outputs(values: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if one of the files to write could not be written, or is named twice or
    also read.
    """
    for name in (name for name in OUTPUTS if values.get(name) is not None):
        path = values[name]
        check_output(name, path)
        others = (
            (other, given)
            for other, value in values.items()
            for given in _paths(other, value)
            if other != name
        )
        for other, given in others:
            if os.path.realpath(expand_home(given)) == os.path.realpath(path):
                raise ConfigError(
                    f"{name} is {path}, and so is {other}: give each a file of its own"
                )


def check_output(name: str, path: Path) -> None:
    """Raise `ConfigError` if no file could be written at `path`, the value of option `name`."""
    try:
        if path.is_dir():
            raise ConfigError(f"{name} is {path}, this is a folder: give the path of a file")
        if not path.absolute().parent.is_dir():
            raise ConfigError(f"{name} is {path}, there is no folder {path.parent}: make it first")
        if path.is_file():
            os.close(os.open(path, os.O_WRONLY))
        elif not path.exists():  # a pipe or a device is opened once only
            path.touch()
            path.unlink()
    except OSError as error:
        raise ConfigError(f"{name} is {path}, it cannot be written: {error.strerror}") from error


def check_regular(name: str, path: Path) -> None:
    """Raise `ConfigError` for a device or a pipe, where a whole file replaces what is there or goes
    on with it.
    """
    if path.exists() and not path.is_file():
        raise ConfigError(f"{name} is {path}, it is not a regular file: name another")


def _paths(name: str, value: Any) -> Iterable[Path]:
    """The files that option `name` means."""
    if name in _NAMES and value is not None:
        return [Path(each) for each in (value if isinstance(value, list | tuple) else [value])]
    return [value] if isinstance(value, Path) else []


def check_start(config: EngineConfig) -> None:
    """Raise `ModelError` where the model is not there, `ConfigError` where the current folder is
    gone.

    Print a line where the cache cannot be read.
    """
    try:
        Path.cwd()
    except OSError as error:  # libraries would say that they cannot be loaded
        raise ConfigError(
            f"the current folder cannot be used ({error.strerror}): change to another"
        ) from error
    check_source(config.model)
    _check_cache_folder()


def _check_cache_folder() -> None:
    """It costs time at each start and nothing else, so nothing is refused."""
    for name in ("models", "profiles"):
        folder = cache_folder() / name
        try:
            next(folder.iterdir(), None)
        except FileNotFoundError:  # it will be made
            continue
        except OSError as error:
            tell_error(
                f"cache folder {folder} cannot be read ({error.strerror}): what it is for is made "
                "anew at each start; set TANGRAM_CACHE to another folder",
                "warning",
                "yellow",
            )
            return
