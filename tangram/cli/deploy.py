"""`tangram deploy`: replicas of one engine behind one server, by Ray Serve."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Annotated

from tangram.cli import console
from tangram.cli.options import Panel, option, with_server
from tangram.cli.serve import check_keys, choose_name, first_request
from tangram.cli.serve_options import Host, Port
from tangram.cli.telemetry import logging_as
from tangram.config import EngineConfig
from tangram.errors import ConfigError
from tangram.serve.options import FleetOptions
from tangram.serve.transport.listening import Listener

# Nothing of the ingress or a replica holds up a loop: each needs one loop, and hands nothing over.
_SERVE_SETTINGS = {
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
}

Address = Annotated[
    str | None,
    option(
        Panel.replicas,
        "join the Ray cluster at this address: auto for the one on this machine, or HOST:PORT",
        default="start one on this machine",
    ),
]
Detach = Annotated[
    bool,
    option(
        Panel.replicas,
        "with --address: end when requests are answered, and leave the replicas to the cluster",
        "--detach",
    ),
]
AppName = Annotated[str, option(Panel.replicas, "name of the application in Ray Serve")]


@with_server(FleetOptions)
def deploy(
    config: EngineConfig,
    options: FleetOptions,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    address: Address = None,
    detach: Detach = False,
    app_name: AppName = "tangram",
) -> None:
    """Serve MODEL by replicas on a Ray cluster: an OpenAI-compatible API before several engines."""
    check_keys(options.api_key)
    _check_place(address, host, port, detach=detach)
    name = choose_name(config, options.served_model_name)
    curl = first_request(f"http://{host}:{port}/v1", name, chats=True, locked=bool(options.api_key))
    # A cluster that is joined has settings of its own.
    settings = nullcontext() if address is not None else _apply_settings()
    with logging_as(options.log_format), settings:
        _import_ray()
        from tangram.ray.cluster import ClusterPlace, run_application

        place = ClusterPlace(address, host, port, app_name)
        tell = partial(console.tell, curl)
        run_application(config, options, place, stays=detach, on_ready=tell)


def _check_place(address: str | None, host: str, port: int, *, detach: bool) -> None:
    """Raise `ConfigError` for what cannot be, before anything is started."""
    if detach and address is None:
        raise ConfigError("detach is given without address: nothing would keep the cluster running")
    if port == 0:
        raise ConfigError("port is 0, all nodes of a cluster listen at one port: name it")
    if address is None:
        Listener.at(host, port).close()  # an address in use is an error at once


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
