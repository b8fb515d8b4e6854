"""The arguments of `serve run`: options of the engine, of the server and of Ray, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pydantic import TypeAdapter, ValidationError
from ray.serve.config import AutoscalingConfig

from tangram.config import OPTIONS, EngineConfig
from tangram.errors import ConfigError
from tangram.limits import SERVED_QUEUE
from tangram.serve.options import FleetOptions


def read_arguments(given: Mapping[str, Any]) -> tuple[EngineConfig, FleetOptions]:
    """The arguments of `serve run` or of a Serve YAML: any field of both classes.

    Texts become numbers where a field wants a number. Raises `ConfigError` naming what is wrong.
    """
    engine = {"max_queue": SERVED_QUEUE} | {name: given[name] for name in given if name in OPTIONS}
    rest = {name: value for name, value in given.items() if name not in OPTIONS}
    with _one_line():
        return TypeAdapter(EngineConfig).validate_python(engine), FleetOptions.model_validate(rest)


def check_autoscaling(options: FleetOptions) -> None:
    """Raise `ConfigError` naming what Ray would refuse."""
    if options.autoscaling is not None:
        with _one_line():
            AutoscalingConfig.model_validate(options.autoscaling)


@contextmanager
def _one_line() -> Iterator[None]:
    """Turn what Pydantic says into a `ConfigError`."""
    try:
        yield
    except ValidationError as error:
        raise ConfigError("; ".join(map(_describe, error.errors()))) from error


def _describe(error: Any) -> str:
    name = ".".join(map(str, error["loc"]))
    if error["type"] == "extra_forbidden":
        return f"{name} is no option: `tangram deploy --help` lists them"
    return f"{name} is {error['input']!r}: {error['msg']}"
