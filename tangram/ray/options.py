"""The options of a deployment: those of the engine, those of the server, and those of Ray."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from ray.serve.config import AutoscalingConfig

from tangram.config import OPTIONS, EngineConfig
from tangram.errors import ConfigError
from tangram.kv_events.address import EventAddress
from tangram.limits import SERVED_QUEUE, SERVER_BOUNDS
from tangram.serve.logs import LogForm


def _within(name: str) -> Any:
    """The bounds of an option, as Pydantic has them."""
    bounds = SERVER_BOUNDS[name]
    if bounds.open_low:
        return Field(gt=bounds.low, le=bounds.high)
    return Field(ge=bounds.low, le=bounds.high)


class FleetOptions(BaseModel):
    """What a deployment is told besides its `EngineConfig`, in the names of `tangram deploy`.

    With `autoscaling` (the fields of Ray's `AutoscalingConfig`) the number of replicas follows the
    load, and `replicas` says nothing. `cpus_per_replica` None is the number of threads, or 1, for
    each rank. `gpus_per_replica` None is one for each rank where the cluster has GPUs and the
    device is not cpu, else 0.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    replicas: Annotated[int, _within("replicas")] = 1
    autoscaling: dict[str, Any] | None = None
    cpus_per_replica: Annotated[float, _within("cpus_per_replica")] | None = None
    gpus_per_replica: Annotated[float, _within("gpus_per_replica")] | None = None
    report_every_s: Annotated[float, _within("report_every_s")] = 1.0
    served_model_name: str | None = None
    api_key: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    unknown_fields: Literal["refuse", "warn"] = "refuse"
    max_body_mb: Annotated[float, _within("max_body_mb")] = 16.0
    request_timeout_s: Annotated[float, _within("request_timeout_s")] = 3600.0
    shutdown_grace_s: Annotated[float, _within("shutdown_grace_s")] = 20.0
    log_format: LogForm = LogForm.text
    metrics_aliases: Literal["vllm"] | None = None
    otlp_endpoint: str | None = None
    kv_events: str | None = None
    kv_events_replay: str | None = None
    kv_events_topic: str = ""

    @property
    def events(self) -> EventAddress | None:
        """Where the first replica of a machine publishes KV events. Raises `ConfigError`."""
        address = EventAddress.of(self.kv_events, self.kv_events_replay, self.kv_events_topic)
        return None if address is None else address.of_rank(0)

    @property
    def most_replicas(self) -> int:
        """How many replicas there may be."""
        scaled = self.autoscaling
        return self.replicas if scaled is None else int(scaled.get("max_replicas", 1))


def read_arguments(given: Mapping[str, Any]) -> tuple[EngineConfig, FleetOptions]:
    """The arguments of `serve run` or of a Serve YAML: any field of both classes.

    Texts become numbers where a field wants one. Raises `ConfigError` naming what is wrong.
    """
    engine = {"max_queue": SERVED_QUEUE} | {name: given[name] for name in given if name in OPTIONS}
    rest = {name: value for name, value in given.items() if name not in OPTIONS}
    with _one_line():
        config = TypeAdapter(EngineConfig).validate_python(engine)
    return config, read_options(rest)


def read_options(given: Mapping[str, Any]) -> FleetOptions:
    """The options of these names. Raises `ConfigError` naming what is wrong."""
    with _one_line():
        options = FleetOptions.model_validate(given)
        if options.autoscaling is not None:
            AutoscalingConfig.model_validate(options.autoscaling)
    return options


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
