"""`tangram deploy`: replicas of one engine behind one server, by Ray Serve."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from tangram.cli import console
from tangram.cli.deploy_options import (
    Address,
    AppName,
    Autoscaling,
    CpusPerReplica,
    Detach,
    GpusPerReplica,
    Replicas,
    ReportEvery,
)
from tangram.cli.options import with_config
from tangram.cli.serve import check_keys, first_request
from tangram.cli.serve_options import (
    AllowedOrigins,
    ApiKeys,
    Host,
    KvEvents,
    KvEventsReplay,
    KvEventsTopic,
    MaxBodyMb,
    MaxQueue,
    OnUnknownFields,
    Port,
    RequestTimeout,
    ServedModelName,
    ShutdownGrace,
    UnknownFields,
)
from tangram.cli.telemetry import LogFormat, MetricsAliases, OtlpEndpoint, OverflowEvery, logging_as
from tangram.config import EngineConfig
from tangram.errors import ConfigError
from tangram.limits import SERVED_QUEUE
from tangram.model.source import name_served_model
from tangram.serve.guard import check_served_name
from tangram.serve.listening import Listener
from tangram.serve.logs import LogForm

# Nothing of the ingress or a replica holds up a loop: each needs one, and hands nothing over.
_SERVE_SETTINGS = {
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
}


@with_config
def deploy(
    config: EngineConfig,
    replicas: Replicas = 1,
    autoscaling: Autoscaling = None,
    address: Address = None,
    detach: Detach = False,
    app_name: AppName = "tangram",
    cpus_per_replica: CpusPerReplica = None,
    gpus_per_replica: GpusPerReplica = None,
    report_every_s: ReportEvery = 1.0,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    served_model_name: ServedModelName = None,
    api_key: ApiKeys = None,
    allowed_origins: AllowedOrigins = None,
    unknown_fields: OnUnknownFields = UnknownFields.refuse,
    max_body_mb: MaxBodyMb = 16.0,
    max_queue: MaxQueue = SERVED_QUEUE,
    request_timeout_s: RequestTimeout = 3600,
    shutdown_grace_s: ShutdownGrace = 20,
    log_format: LogFormat = LogForm.text,
    metrics_aliases: MetricsAliases = None,
    otlp_endpoint: OtlpEndpoint = None,
    overflow_every: OverflowEvery = None,
    kv_events: KvEvents = None,
    kv_events_replay: KvEventsReplay = None,
    kv_events_topic: KvEventsTopic = "",
) -> None:
    """Serve MODEL by replicas on a Ray cluster: an OpenAI-compatible API before several engines."""
    check_keys(api_key)
    _check_place(address, host, port, detach=detach)
    name = name_served_model(config.model) if served_model_name is None else served_model_name
    check_served_name(name)
    given = {
        "replicas": replicas,
        "autoscaling": _read_json(autoscaling),
        "cpus_per_replica": cpus_per_replica,
        "gpus_per_replica": gpus_per_replica,
        "report_every_s": report_every_s,
        "served_model_name": name,
        "api_key": api_key or (),
        "allowed_origins": allowed_origins or (),
        "unknown_fields": unknown_fields,
        "max_body_mb": max_body_mb,
        "request_timeout_s": request_timeout_s,
        "shutdown_grace_s": shutdown_grace_s,
        "log_format": log_format,
        "metrics_aliases": metrics_aliases,
        "otlp_endpoint": otlp_endpoint,
        "kv_events": kv_events,
        "kv_events_replay": kv_events_replay,
        "kv_events_topic": kv_events_topic,
    }
    wanted = replace(config, max_queue=max_queue, overflow_every=overflow_every)
    curl = first_request(f"http://{host}:{port}/v1", name, chats=True, locked=bool(api_key))
    with logging_as(log_format):
        _run(wanted, given, address, host, port, app_name, stays=detach, curl=curl)


def _run(
    config: EngineConfig,
    options: Mapping[str, Any],
    address: str | None,
    host: str,
    port: int,
    app_name: str,
    *,
    stays: bool,
    curl: str,
) -> None:
    """See `run_application`; `curl` is shown when requests are answered."""
    # A cluster that is joined has settings of its own.
    with nullcontext() if address is not None else _apply_settings():
        _import_ray()
        from tangram.ray.cluster import ClusterPlace, run_application
        from tangram.ray.options import read_options

        place = ClusterPlace(address, host, port, app_name)
        tell = partial(console.tell, curl)
        run_application(config, read_options(options), place, stays=stays, on_ready=tell)


def _check_place(address: str | None, host: str, port: int, *, detach: bool) -> None:
    """Raise `ConfigError` for what cannot be, before anything is started."""
    if detach and address is None:
        raise ConfigError("detach is given without address: nothing would keep the cluster running")
    if port == 0:
        raise ConfigError("port is 0, all nodes of a cluster listen at one port: name it")
    if address is None:
        Listener.at(host, port).close()  # an address in use is an error at once


def _read_json(text: str | None) -> Any:
    if text is None:
        return None
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"autoscaling is {text!r}, which is no JSON: {error}") from error


@contextmanager
def _apply_settings() -> Iterator[None]:
    """Settings that Serve reads when it is imported, here and in processes that start inside."""
    missing = _SERVE_SETTINGS.keys() - os.environ.keys()
    os.environ.update({name: _SERVE_SETTINGS[name] for name in missing})
    try:
        yield
    finally:
        for name in missing:
            del os.environ[name]


def _import_ray() -> None:
    try:
        import ray.serve  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "deploy needs Ray Serve, which is not installed: pip install 'tangram-serve[ray]'"
        ) from error
