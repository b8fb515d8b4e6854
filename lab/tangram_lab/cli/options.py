"""Options of the engine that commands of the lab take, by themselves or all together."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from tangram.cli.options import (
    ENGINE_PARAMETERS,
    Command,
    engine_option,
    start_config,
    take_options,
)
from tangram.config import ModelDtype

Gate = Annotated[str | None, engine_option("gate")]
CacheGib = Annotated[float | None, engine_option("kv_cache_gib")]
Utilization = Annotated[float, engine_option("gpu_memory_utilization")]
MaxSeqs = Annotated[int, engine_option("max_num_seqs")]
MaxBatched = Annotated[int, engine_option("max_num_batched_tokens")]
Dtype = Annotated[ModelDtype, engine_option("dtype")]
Eager = Annotated[bool, engine_option("enforce_eager")]
Device = Annotated[str, engine_option("device")]
Threads = Annotated[int | None, engine_option("threads")]

Options = TypeVar("Options")


def take_fields(
    kind: type[Options],
) -> Callable[[Callable[[typer.Context, Options], None]], Command]:
    """A decorator: the command takes the fields of the dataclass `kind` as options, in their order.

    The command is called with its context and one object of that class.
    """
    hints = get_type_hints(kind, include_extras=True)
    entries = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=getattr(kind, name), annotation=hint
        )
        for name, hint in hints.items()
    ]
    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)

    def decorate(command: Callable[[typer.Context, Options], None]) -> Command:
        def run(context: typer.Context, **given: Any) -> None:
            command(context, kind(**given))

        run.__signature__ = inspect.Signature([context, *entries])  # type: ignore[attr-defined]
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return run

    return decorate


# Requests of a measurement are no chats and state all sampling, whatever a model's files say.
_OF_CHATS = ("generation_config", "chat_template", "tool_format", "thinking_format")
_MEASURED = [each for each in ENGINE_PARAMETERS if each.name not in _OF_CHATS]
with_measured_config = take_options((_MEASURED, start_config))
