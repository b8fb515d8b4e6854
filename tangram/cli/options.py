"""The options that every command shares, and the `EngineConfig` they make."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Annotated, Any

import typer
from pydantic import BaseModel

from tangram.cli.checks import check_start, within
from tangram.config import (
    OPTIONS,
    SERVED_SCORER,
    TYPES,
    EngineConfig,
    KvCacheDtype,
    LoadFormat,
    Option,
    OptionGroup,
    SmallWeights,
)
from tangram.limits import SERVED_QUEUE, TEMPERATURE, Bounds

KEY_VARIABLE = "TANGRAM_API_KEY"
_ON_BY_DEFAULT = "enable_prefix_caching"  # the only flag
Panel = OptionGroup  # of a command's help; options of one command alone stand before them


def option(
    panel: OptionGroup, help_text: str, *names: str, default: str | None = None, **more: Any
) -> Any:
    """A `typer.Option` in a panel. Help shows `default` for an option whose default is None."""
    shown: bool | str = True if default is None else default
    return typer.Option(
        *names, help=help_text, rich_help_panel=panel.value, show_default=shown, **more
    )


def number(bounds: Bounds, help_text: str, **more: Any) -> Any:
    """A `typer.Option` of a number that must lie within `bounds`."""
    return typer.Option(help=help_text, callback=within(bounds), **more)


def engine_option(
    name: str,
    text: str | None = None,
    *,
    unset: str | None = None,
    panel: OptionGroup | None = None,
) -> Any:
    """The `typer.Option` of a field of `EngineConfig`.

    `text` and `unset` replace what `OPTIONS` says, for one command.
    """
    about = OPTIONS[name]
    changes: dict[str, Any] = {"text": text, "unset": unset, "group": panel}
    changed = replace(about, **{key: value for key, value in changes.items() if value is not None})
    return _declare(name, changed, **({"metavar": "DTYPE"} if name == "dtype" else {}))


def _declare(name: str, about: Option, **more: Any) -> Any:
    if about.bounds is not None:
        more["callback"] = within(about.bounds, about.hint)
    shown = f"--{'no-' if name == _ON_BY_DEFAULT else ''}{name.replace('_', '-')}"
    return option(about.group, about.text, shown, default=about.unset, **more)


Model = Annotated[str, typer.Argument(help=OPTIONS["model"].text)]
Retention = Annotated[float, engine_option("kv_retention")]
Chunk = Annotated[int, engine_option("chunk_tokens")]
Page = Annotated[int, engine_option("page_tokens")]
Heads = Annotated[int, engine_option("heads_per_page")]
CacheDtype = Annotated[KvCacheDtype, engine_option("kv_cache_dtype")]
Quantization = Annotated[SmallWeights | None, engine_option("quantization")]
Weights = Annotated[LoadFormat, engine_option("load_format")]

Temperature = Annotated[
    float | None,
    number(
        TEMPERATURE,
        "temperature of sampling; 0 takes the likeliest token",
        show_default="the model's own",
    ),
]

SAMPLES = Bounds(1, 10_000)
CalibrationTexts = Annotated[
    int | None, number(SAMPLES, "built-in texts to calibrate on", show_default="50")
]


def _parameter(name: str, info: Any = None) -> inspect.Parameter:
    """The parameter of a command for the field `name`.

    A flag that is on by default has its negative name.
    """
    kind, value = TYPES[name], getattr(EngineConfig, name)
    if name == "model":
        return inspect.Parameter(name, _KEYWORD, default=value, annotation=Model)
    if name == "profile":
        kind, value = list[str] | None, None
    if name == "speculative_config":
        kind = str | None
    if name == _ON_BY_DEFAULT:
        info = engine_option(name, "do not reuse the KV state of prefixes seen before")
        name, value = f"no_{name}", False
    info = engine_option(name) if info is None else info
    return inspect.Parameter(name, _KEYWORD, default=value, annotation=Annotated[kind, info])


def engine_config(**options: Any) -> EngineConfig:
    """The config that the values of `ENGINE_PARAMETERS`, or of some of them, make."""
    if f"no_{_ON_BY_DEFAULT}" in options:
        options[_ON_BY_DEFAULT] = not options.pop(f"no_{_ON_BY_DEFAULT}")
    return EngineConfig(**options | {"profile": options.get("profile") or ()})


_KEYWORD = inspect.Parameter.KEYWORD_ONLY
ENGINE_PARAMETERS = tuple(
    _parameter(name) for name, about in OPTIONS.items() if not about.served_alone
)
_SERVED_PARAMETERS = (
    *ENGINE_PARAMETERS,
    _parameter(
        "max_queue", engine_option("max_queue", unset=str(SERVED_QUEUE), panel=Panel.server)
    ).replace(default=SERVED_QUEUE),
    _parameter("overflow_every"),
    _parameter("save_failed_passes"),
)
_CALIBRATED = {
    "scorer": engine_option("scorer", unset=SERVED_SCORER),
    "scope": engine_option("scope", unset="model (tova: layer)"),
    "seed": engine_option("seed", "seed of the built-in texts, and of a gate's training"),
}
CALIBRATION_PARAMETERS = tuple(
    _parameter(name, _CALIBRATED.get(name))
    for name in (
        *("model", "kv_retention", "scorer", "scope", "chunk_tokens", "page_tokens"),
        *("heads_per_page", "gate", "dtype", "quantization", "load_format", "device", "threads"),
        "seed",
    )
)


def calibration_config(**options: Any) -> EngineConfig:
    """The config of a calibration. No engine is built, so all other fields have their defaults."""
    # A config must allow a whole chunk in one step, even if no step is run.
    least = options["chunk_tokens"] + EngineConfig.max_num_seqs
    return engine_config(
        **options, max_num_batched_tokens=max(EngineConfig.max_num_batched_tokens, least)
    )


def find_changed(config: EngineConfig, *names: str) -> dict[str, object]:
    """The values of the fields called `names` that differ from their defaults."""
    return {
        name: value
        for name in names
        if (value := getattr(config, name)) != getattr(EngineConfig, name)
    }


Command = Callable[..., None]


def take_options(
    *made: tuple[Sequence[inspect.Parameter], Callable[..., Any]],
) -> Callable[[Command], Command]:
    """A decorator: the command takes options that it has in common with others.

    Each pair has such options, and what makes one thing of their values: these things are the first
    arguments of the command.
    """

    def decorate(command: Command) -> Command:
        alone = list(inspect.signature(command, eval_str=True).parameters.values())[len(made) :]

        def run(**options: Any) -> None:
            things = [
                make(**{each.name: options.pop(each.name) for each in shared})
                for shared, make in made
            ]
            command(*things, **options)

        first, *others = (shared for shared, _ in made)
        entries = [entry.replace(kind=_KEYWORD) for entry in chain(first, alone, *others)]
        run.__signature__ = inspect.Signature(sorted(entries, key=_place))  # type: ignore[attr-defined]
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return run

    return decorate


def with_server(kind: type[BaseModel]) -> Callable[[Command], Command]:
    """A decorator: the command takes the fields of `kind` as options, beside those of an engine.

    It is called with an `EngineConfig` and a `kind`.
    """

    def make(**given: Any) -> BaseModel:
        return kind(**{name: value for name, value in given.items() if value is not None})

    shared = [_server_parameter(name, field) for name, field in kind.model_fields.items()]
    return take_options((_SERVED_PARAMETERS, start_config), (shared, make))


def start_config(**options: Any) -> EngineConfig:
    """The config of an engine that is about to start. Raises as `check_start` does."""
    config = engine_config(**options)
    check_start(config)
    return config


def _server_parameter(name: str, field: Any) -> inspect.Parameter:
    """The parameter of a command for a field of `serve.options`."""
    kind, default = field.annotation, field.default
    if default == ():  # repeated
        kind, default = list[str] | None, None
    if name == "autoscaling":  # as JSON
        kind = str | None
    more = {"envvar": KEY_VARIABLE} if name == "api_key" else {}
    info = _declare(name, field.json_schema_extra["option"], **more)
    return inspect.Parameter(name, _KEYWORD, default=default, annotation=Annotated[kind, info])


def _place(parameter: inspect.Parameter) -> int:
    """The place of a parameter in help: options without a panel first, then panel by panel."""
    (info, *_) = parameter.annotation.__metadata__
    return -1 if info.rich_help_panel is None else list(Panel).index(Panel(info.rich_help_panel))


# For commands that build an engine.
with_config = take_options((ENGINE_PARAMETERS, start_config))
