"""Run the application on a Ray cluster until a signal, and leave nothing behind."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType

import ray
from colorama import colorama_text  # type: ignore[import-untyped]  # Ray brings it
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import HTTPOptions
from ray.serve.exceptions import RayServeException

from tangram.config import EngineConfig
from tangram.errors import ConfigError, EngineError, ModelError, ProfileError, TangramError
from tangram.ray.application import build_application, check_application
from tangram.serve.options import FleetOptions

_LOOK_EVERY_S = 5.0
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# The last line of a traceback.
_RAISED = re.compile(r"(?:\w+\.)*(\w+(?:Error|Exception)): (.+)")
_OF_OPTIONS = {kind.__name__: kind for kind in (ConfigError, ModelError, ProfileError)}
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ClusterPlace:
    """Where the application runs: the cluster at `address`, or with None a new one here.

    Each node of the cluster listens at `host`:`port`. `app_name` is the application's in Ray Serve.
    """

    address: str | None
    host: str
    port: int
    app_name: str


def run_application(
    config: EngineConfig,
    options: FleetOptions,
    place: ClusterPlace,
    *,
    stays: bool,
    on_ready: Callable[[], None],
) -> None:
    """Deploy, call `on_ready`, and wait for SIGTERM, SIGINT or SIGHUP. Then requests may end.

    An application of the same name is replaced, replica by replica. With `stays` it returns when
    requests are answered, and leaves the application to the cluster. Raises `ConfigError` for an
    option or an address that is wrong, `EngineError` if replicas do not start or the cluster ends.
    """
    begin_s = time.monotonic()
    away = place.address is not None and not all(map(os.path.exists, config.profile))
    check_application(replace(config, profile=()) if away else config, options)
    # Ray colours what it passes on from its processes, wherever that goes.
    with colorama_text(), _join(place), _catch_signals() as ended:
        serve.start(
            proxy_location="EveryNode", http_options=HTTPOptions(host=place.host, port=place.port)
        )
        try:
            serve.run(build_application(config, options), name=place.app_name, route_prefix="/")
        except (RayError, RayServeException, RuntimeError) as error:
            raise _explain_failure(place.app_name, error) from error
        _log.info("ready after %.1f s", time.monotonic() - begin_s)
        on_ready()
        if stays:
            return
        _wait(ended)
        _log.info(
            "waiting up to %g s for answers, a signal again ends the process",
            options.shutdown_grace_s,
        )
        serve.delete(place.app_name)


def _explain_failure(app_name: str, error: Exception) -> TangramError:
    """What a replica has said that could not start, or else what Ray says."""
    deployments = serve.status().applications[app_name].deployments.values()
    for line in reversed([line for each in deployments for line in each.message.splitlines()]):
        if (said := _RAISED.fullmatch(line.strip())) is not None:
            kind, reason = said.groups()
            return _OF_OPTIONS.get(kind, EngineError)(f"a replica has not started: {reason}")
    return EngineError(f"the replicas have not started: {error}")


@contextmanager
def _join(place: ClusterPlace) -> Iterator[None]:
    """Connected to the cluster of `place`; one that is started here ends here."""
    if place.address is None:
        # Nobody has been asked whether Ray may report how it is used.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray.init(
            address=place.address or "local",
            include_dashboard=None if place.address else False,
            log_to_driver=place.address is None,
        )
    except Exception as error:  # it raises this very class, too, where a process is too slow
        if place.address is None:
            raise EngineError(f"Ray has not started: {error}") from error
        if not isinstance(error, (ConnectionError, ValueError, RayError)):
            raise
        raise ConfigError(
            f"address is {place.address}, no cluster answers there: start one with `ray start "
            "--head`, and set RAY_AUTH_MODE=token if it asks for a token"
        ) from error
    try:
        yield
    finally:
        # It ends the processes of a cluster that was started here. `serve.shutdown` before it would
        # have Ray report a failed task: the controller ends while it answers.
        ray.shutdown()


@contextmanager
def _catch_signals() -> Iterator[threading.Event]:
    """An event that is set by a signal to end. A second signal ends the process at once."""
    ended = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        if ended.is_set():
            os._exit(128 + number)
        ended.set()

    previous = {number: signal.signal(number, end) for number in _ENDING}
    try:
        yield ended
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _wait(ended: threading.Event) -> None:
    while not ended.wait(_LOOK_EVERY_S):
        try:
            serve.status()
        except (RayError, RayServeException) as error:
            raise EngineError(f"the Ray cluster does not answer any more: {error}") from error
