"""The Serve application: an ingress over replicas of one engine, and how Ray runs them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from uuid import uuid4

import ray
from ray import serve
from ray.serve import Application

from tangram.compress.scorers import check_retention
from tangram.config import EngineConfig
from tangram.engine.setup.profiles import Compression
from tangram.errors import ConfigError
from tangram.foreign_files import expand_home
from tangram.limits import SERVED_QUEUE
from tangram.model.source import name_served_model
from tangram.ray.ingress import Ingress
from tangram.ray.options import check_autoscaling, read_arguments
from tangram.ray.replica import EngineReplica
from tangram.serve.observability.tracing import check_traces
from tangram.serve.options import FleetOptions
from tangram.serve.transport.guard import check_served_name
from tangram.serve.transport.wire import MAX_CONNECTIONS

ENGINE, INGRESS = "Engine", "Ingress"
ROUTER = "tangram.ray.router:ChunkRouter"
# A constructor fails for a wrong option or a missing file: other attempts fail, too.
_MOST_STARTS = 2
_LOGGING = {"enable_access_log": False}  # it would have a line for each report


def app(args: Mapping[str, Any]) -> Application:
    """The builder that `serve run tangram.ray:app model=smollm2 replicas=3` and a Serve YAML name.

    `args` are options of `tangram deploy`, spelled with underscores. Raises `ConfigError`.
    """
    return build_application(*read_arguments(args))


def build_application(
    config: EngineConfig, options: FleetOptions, router: str = ROUTER
) -> Application:
    """The application of `config`; `router` is where the class of the request router lies.

    Raises as `check_application` does, but for profiles: they may lie where the replicas run.
    """
    check_application(replace(config, profile=()), options)
    model = options.served_model_name or name_served_model(config.model)
    waiting = SERVED_QUEUE if config.max_queue is None else config.max_queue
    engine = serve.deployment(
        name=ENGINE,
        **_scale(options),
        # A replica that has as many refuses, and the router asks the next replica.
        max_ongoing_requests=config.max_num_seqs + waiting,
        graceful_shutdown_timeout_s=options.shutdown_grace_s,
        graceful_shutdown_wait_loop_s=0.2,
        max_constructor_retry_count=_MOST_STARTS,
        ray_actor_options={
            "num_cpus": _count_cpus(config, options),
            "num_gpus": _count_gpus(config, options),
        },
        logging_config=_LOGGING,
        request_router_config={
            "request_router_class": router,
            "request_routing_stats_period_s": options.report_every_s,
        },
    )(EngineReplica)
    ingress = serve.deployment(
        name=INGRESS,
        max_ongoing_requests=MAX_CONNECTIONS,
        graceful_shutdown_timeout_s=options.shutdown_grace_s,
        graceful_shutdown_wait_loop_s=0.2,
        max_constructor_retry_count=_MOST_STARTS,
        ray_actor_options={"num_cpus": 0},
        max_surge_percent=100,  # the new one answers before the old one ends
        logging_config=_LOGGING,
    )(serve.ingress()(Ingress))
    version = uuid4().hex  # Ray replaces all replicas whenever it takes another application
    engines = engine.bind(_with_whole_paths(config), options.log_format, version, options.events)
    return ingress.bind(engines, model, options, version)


def check_application(config: EngineConfig, options: FleetOptions) -> None:
    """Check what can be known before a replica is started, which takes long, and fails far away.

    Raises `ConfigError` for a wrong name of the model, keys or origins that are wrong, GPUs that do
    not fit, or KV events and traces that cannot be sent. Raises `ProfileError` if profiles are
    unreadable, made for other options, or lack the default ρ.
    """
    model = options.served_model_name or name_served_model(config.model)
    check_served_name(model)
    check_autoscaling(options)
    _ = options.events
    if options.otlp_endpoint is not None:  # variables are those of the ingress
        check_traces(options.otlp_endpoint, model)
    ranks, given = config.tensor_parallel_size, options.gpus_per_replica
    if given is not None and (given > ranks or 0 < given < ranks != 1):
        raise ConfigError(
            f"gpus_per_replica is {given:g}, and a replica with tensor_parallel_size {ranks} "
            f"computes on {ranks}: set {ranks}, or leave it out"
        )
    Compression.of(config, None).check_without_model()
    check_retention(config)


def _scale(options: FleetOptions) -> dict[str, Any]:
    if options.autoscaling is not None:
        return {"autoscaling_config": options.autoscaling}
    return {"num_replicas": options.replicas}


def _count_cpus(config: EngineConfig, options: FleetOptions) -> float:
    if options.cpus_per_replica is not None:
        return options.cpus_per_replica
    return (config.threads or 1) * config.tensor_parallel_size


def _count_gpus(config: EngineConfig, options: FleetOptions) -> float:
    """The GPUs of a replica: each rank has its own. One engine may share a GPU with others."""
    ranks, given = config.tensor_parallel_size, options.gpus_per_replica
    if given is not None:
        return given
    has_gpus = ray.is_initialized() and "GPU" in ray.cluster_resources()  # type: ignore[no-untyped-call]
    return float(ranks if has_gpus and config.device != "cpu" else 0)


def _with_whole_paths(config: EngineConfig) -> EngineConfig:
    """`config` with paths that do not depend on the current folder: workers have another folder."""
    changes: dict[str, Any] = {
        name: _whole(value)
        for name in ("model", "gate")
        if (value := getattr(config, name)) is not None
    }
    return replace(config, **changes, profile=tuple(map(_whole, config.profile)))


def _whole(name: str) -> str:
    path = expand_home(name)
    return os.path.realpath(path) if path.exists() else name
