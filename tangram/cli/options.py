"""The options that every command shares, and the `EngineConfig` they make."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Annotated, Any

import typer

from tangram.cli.checks import check_start, within
from tangram.config import (
    OPTIONS,
    SERVED_SCORER,
    TYPES,
    EngineConfig,
    KvCacheDtype,
    LoadFormat,
    SmallWeights,
)
from tangram.limits import Bounds


class Panel(StrEnum):
    """The panels of a command's help. Options of one command alone stand before them."""

    model = "Model"
    memory = "Memory"
    compression = "Compression"
    batching = "Batching"
    server = "Server"
    replicas = "Replicas"
    expert = "Expert"


def option(
    panel: Panel, help_text: str, *names: str, default: str | None = None, **more: Any
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
    name: str, text: str | None = None, *, unset: str | None = None, panel: Panel | None = None
) -> Any:
    """The `typer.Option` of a field of `EngineConfig`.

    `text` and `unset` replace what `OPTIONS` says, for one command.
    """
    about = OPTIONS[name]
    more: dict[str, Any] = {}
    if about.bounds is not None:
        more["callback"] = within(about.bounds, about.hint)
    if name == "dtype":
        more["metavar"] = "DTYPE"
    flags = {
        "enable_prefix_caching": ["--no-enable-prefix-caching"],
        "enforce_eager": ["--enforce-eager"],
        "compile_decode": ["--compile-decode"],
        "profile": ["--profile"],
    }
    return option(
        panel or Panel(about.group.value),
        text or about.text,
        *flags.get(name, []),
        default=unset or about.unset,
        **more,
    )


Model = Annotated[str, typer.Argument(help=OPTIONS["model"].text)]
Retention = Annotated[float, engine_option("kv_retention")]
Chunk = Annotated[int, engine_option("chunk_tokens")]
Page = Annotated[int, engine_option("page_tokens")]
Heads = Annotated[int, engine_option("heads_per_page")]
CacheDtype = Annotated[KvCacheDtype, engine_option("kv_cache_dtype")]
Quantization = Annotated[SmallWeights | None, engine_option("quantization")]
Weights = Annotated[LoadFormat, engine_option("load_format")]

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
    if name == "enable_prefix_caching":
        info = engine_option(name, "do not reuse the KV state of prefixes seen before")
        name, value = "no_enable_prefix_caching", False
    info = engine_option(name) if info is None else info
    return inspect.Parameter(name, _KEYWORD, default=value, annotation=Annotated[kind, info])


def engine_config(**options: Any) -> EngineConfig:
    """The config that the values of `ENGINE_PARAMETERS`, or of some of them, make."""
    if "no_enable_prefix_caching" in options:
        options["enable_prefix_caching"] = not options.pop("no_enable_prefix_caching")
    return EngineConfig(**options | {"profile": options.get("profile") or ()})


_KEYWORD = inspect.Parameter.KEYWORD_ONLY
ENGINE_PARAMETERS = tuple(
    _parameter(name) for name, about in OPTIONS.items() if not about.served_alone
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
    shared: Sequence[inspect.Parameter],
    make: Callable[..., EngineConfig],
    check: Callable[[EngineConfig], None] | None = None,
) -> Callable[[Command], Command]:
    """A decorator: the command takes the `shared` options.

    `make` builds the `EngineConfig` that becomes its first argument. `check` raises for a config
    that the command cannot use.
    """

    def decorate(command: Command) -> Command:
        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]

        def run(**options: Any) -> None:
            config = make(**{parameter.name: options.pop(parameter.name) for parameter in shared})
            if check is not None:
                check(config)
            command(config, **options)

        entries = sorted((entry.replace(kind=_KEYWORD) for entry in (*shared, *own)), key=_place)
        run.__signature__ = inspect.Signature(entries)  # type: ignore[attr-defined]
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return run

    return decorate


def _place(parameter: inspect.Parameter) -> int:
    """The place of a parameter in help: options without a panel first, then panel by panel."""
    (info, *_) = parameter.annotation.__metadata__
    return -1 if info.rich_help_panel is None else list(Panel).index(Panel(info.rich_help_panel))


# For commands that build an engine.
with_config = take_options(ENGINE_PARAMETERS, engine_config, check_start)
