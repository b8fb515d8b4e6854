"""Checks that a command makes before it imports torch, which takes seconds."""

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
from tangram.model.chat_template import read_template
from tangram.model.generation import check_option
from tangram.model.source import check_source
from tangram.speculative_config import DraftModel

OUTPUTS = ("output", "report", "plot", "train_gate")  # the options that name a file to write
_NAMES = ("model", "profile", "gate")  # options of type text that may name a file


def within(bounds: Bounds, hint: str = "") -> Callable[[typer.CallbackParam, Any], Any]:
    """A callback of an option that raises `ConfigError` if the number is not within `bounds`."""

    def check(parameter: typer.CallbackParam, value: float | None) -> float | None:
        if value is not None:
            bounds.check_option(str(parameter.name), value, hint)
        return value

    return check


def as_texts(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same options with all texts decoded as UTF-8, whatever the locale is.

    Raises `ConfigError` for bytes that are not UTF-8. Paths are returned unchanged.
    """
    return {
        name: [as_text(name, part) for part in value]
        if isinstance(value, list | tuple)  # an option that may be repeated
        else as_text(name, value)
        for name, value in values.items()
    }


def as_text(name: str, value: Any) -> Any:
    """A text decoded as UTF-8, or any other value unchanged.

    Raises `ConfigError` for bytes that are not UTF-8.
    """
    if not isinstance(value, str) or is_text(value):
        return value
    try:
        return os.fsencode(value).decode()
    except UnicodeError as error:
        raise ConfigError(
            f"{name} is no text, it has bytes that are not UTF-8: give one"
        ) from error


def check_outputs(values: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if an output file cannot be written, is named twice or is an input."""
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
    """Raise `ConfigError` if no file can be written at `path`, the value of option `name`."""
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
    """Raise `ConfigError` for a device or a pipe.

    A command that replaces or extends a file needs a regular file.
    """
    if path.exists() and not path.is_file():
        raise ConfigError(f"{name} is {path}, it is not a regular file: name another")


def _paths(name: str, value: Any) -> Iterable[Path]:
    """The files that option `name` names."""
    if name in _NAMES and value is not None:
        return [Path(each) for each in (value if isinstance(value, list | tuple) else [value])]
    return [value] if isinstance(value, Path) else []


def check_start(config: EngineConfig) -> None:
    """Check what can be checked without torch.

    Raises `ModelError` if a model does not exist, `ConfigError` if a folder does not: the current
    folder, or that of --generation-config.
    Prints a warning if the cache cannot be read.
    """
    try:
        Path.cwd()
    except OSError as error:  # otherwise libraries report that they cannot be loaded
        raise ConfigError(
            f"the current folder cannot be used ({error.strerror}): change to another"
        ) from error
    drafts = config.speculation
    for model in (config.model, *((drafts.model,) if isinstance(drafts, DraftModel) else ())):
        check_source(model, weights=config.load_format != "dummy")
    check_option(config.generation_config)
    if config.chat_template is not None:
        read_template(config.chat_template)
    _check_cache_folder()


def _check_cache_folder() -> None:
    """A cache that cannot be read only costs time at each start, so this is a warning."""
    for name in ("models", "weights"):
        folder = cache_folder() / name
        try:
            next(folder.iterdir(), None)
        except FileNotFoundError:  # it will be made
            continue
        except OSError as error:
            tell_error(
                f"cache folder {folder} cannot be read ({error.strerror}): its contents are made "
                "again at each start; set TANGRAM_CACHE to another folder",
                "warning",
                "yellow",
            )
            return
