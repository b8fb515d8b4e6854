"""The options of a server besides those of its engine: their defaults, bounds and meaning.

`tangram serve`, `tangram deploy` and the arguments of `serve run` are derived from them.
"""

from __future__ import annotations

import json
from enum import StrEnum
from functools import partial
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from tangram.config import Option, OptionGroup
from tangram.errors import ConfigError
from tangram.kv_events.address import EventAddress
from tangram.limits import Bounds
from tangram.serve.observability.logs import LogForm
from tangram.serve.transport.guard import check_api_keys, check_origins


class Visibility(StrEnum):
    """Who may see the web page: see `tangram.web.access.Access`; with OFF there is none."""

    auto = "auto"
    local = "local"
    open = "open"
    off = "off"


def _field(group: OptionGroup, default: Any, text: str, **more: Any) -> Any:
    about = Option(group, text, **more)
    extra: dict[str, Any] = {"option": about}
    if (bounds := about.bounds) is None:
        return Field(default, json_schema_extra=extra)
    low: dict[str, Any] = {"gt" if bounds.open_low else "ge": bounds.low}
    return Field(default, le=bounds.high, json_schema_extra=extra, **low)


_server = partial(_field, OptionGroup.server)
_replicas = partial(_field, OptionGroup.replicas)


class ServerOptions(BaseModel):
    """What a server is told besides its `EngineConfig`, in the names of `tangram serve`.

    Raises `ConfigError` for keys that nobody can send and for what is no origin.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    served_model_name: str | None = _server(
        None, "name of the model in the API", unset="MODEL; last part of a path"
    )
    api_key: Annotated[tuple[str, ...], AfterValidator(check_api_keys)] = _server(
        (), "API key that clients must send; repeat for more; the variable separates keys by spaces"
    )
    allowed_origins: Annotated[tuple[str, ...], AfterValidator(check_origins)] = _server(
        (), "allow browser requests from this origin (https://HOST); repeat for more; * allows all"
    )
    unknown_fields: Literal["refuse", "warn"] = _server(
        "refuse", "refuse requests with unsupported fields, or warn: log and count them"
    )
    max_body_mb: float = _server(
        16.0,
        "maximum size of a request's body in megabytes",
        bounds=Bounds(1e-6, 1024.0),  # one byte and more
    )
    request_timeout_s: float = _server(
        3600,
        "maximum seconds from a request to the end of its answer",
        bounds=Bounds(0.0, 1e9, open_low=True),
    )
    shutdown_grace_s: float = _server(
        20, "seconds that running answers may take after SIGTERM", bounds=Bounds(0.0, 1e6)
    )
    store_path: str | None = _server(
        None,
        "keep responses in this file, also when the server ends",
        unset="a file that ends with the server",
    )
    store_responses: int = _server(
        10_000, "maximum number of stored responses; 0 stores none", bounds=Bounds(0, 1_000_000)
    )
    store_gib: float = _server(
        1.0, "maximum size of stored responses in GiB", bounds=Bounds(0.001, 1024.0)
    )
    store_days: float = _server(
        30.0, "days after which a stored response is removed", bounds=Bounds(1e-6, 36_500.0)
    )
    log_format: LogForm = _server(
        LogForm.text, "json writes an object per line to standard output, also for requests"
    )
    metrics_aliases: Literal["vllm"] | None = _server(
        None, "show metrics under vLLM's names, too", unset="Tangram's names only"
    )
    otlp_endpoint: str | None = _server(
        None,
        "send traces to this OpenTelemetry collector, http://HOST:4318",
        unset="OTEL_EXPORTER_OTLP_ENDPOINT, or none",
    )
    kv_events: str | None = _server(
        None, "publish events of the KV cache here, in vLLM's form: tcp://*:5557", unset="no events"
    )
    kv_events_replay: str | None = _server(
        None, "send events again to those that ask here: tcp://*:5558", unset="nowhere"
    )
    kv_events_topic: str = _server(
        "", "topic of the events; llm-d reads kv@ADDRESS@MODEL", unset="empty"
    )

    @model_validator(mode="after")
    def _a_file_keeps_something(self) -> Self:
        if self.store_path is not None and not self.store_responses:
            raise ConfigError(
                f"store_path is {self.store_path!r} and store_responses is 0, which stores none: "
                "raise store_responses, or leave store_path out"
            )
        return self

    @property
    def events(self) -> EventAddress | None:
        """Where KV events go. Raises `ConfigError`."""
        return EventAddress.of(self.kv_events, self.kv_events_replay, self.kv_events_topic)


def _read_object(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        read = json.loads(value)
    except ValueError as error:
        raise ConfigError(f"autoscaling is {value!r}, which is no JSON: {error}") from error
    if not isinstance(read, dict):
        raise ConfigError(f"autoscaling is {value!r}, it must be an object of JSON")
    return read


class FleetOptions(ServerOptions):
    """What a deployment is told besides its `EngineConfig`, in the names of `tangram deploy`.

    With `autoscaling` (the fields of Ray's `AutoscalingConfig`) the number of replicas follows the
    load, and `replicas` says nothing.
    """

    replicas: int = _replicas(1, "replicas, each with an engine of its own", bounds=Bounds(1, 4096))
    autoscaling: Annotated[dict[str, Any] | None, BeforeValidator(_read_object)] = _replicas(
        None,
        """fields of Ray's AutoscalingConfig instead of --replicas: JSON like '{"min_replicas": """
        """1, "max_replicas": 4}'""",
        unset="as many replicas as --replicas says",
    )
    cpus_per_replica: float | None = _replicas(
        None,
        "CPUs that Ray reserves for a replica",
        bounds=Bounds(0.0, 4096.0),
        unset="--threads, else 1, times --tensor-parallel-size",
    )
    gpus_per_replica: float | None = _replicas(
        None,
        "GPUs that Ray reserves for a replica: --tensor-parallel-size, or a part of one GPU",
        bounds=Bounds(0.0, 4096.0),
        unset="one for each rank if the cluster has some and --device is not cpu",
    )
    report_every_s: float = _replicas(
        1.0,
        "seconds between two reports of a replica to the router",
        bounds=Bounds(0.0, 3600.0, open_low=True),
    )

    @property
    def events(self) -> EventAddress | None:
        """Where the first replica of a machine publishes KV events. Raises `ConfigError`."""
        address = super().events
        return None if address is None else address.of_rank(0)

    @property
    def most_replicas(self) -> int:
        """How many replicas there may be."""
        scaled = self.autoscaling
        return self.replicas if scaled is None else int(scaled.get("max_replicas", 1))
