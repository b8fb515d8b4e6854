"""A server process for a test, and the readings of its /metrics."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from bench.stress.heap import count_into, in_use_mb
from tangram_lab.environment import environment

MODEL = "smollm2"
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 40.0
LOOK_AROUND_S = 3.0


def surroundings() -> dict[str, Any]:
    """The environment of a measurement that begins now, and the machine's other load (percent)."""
    return environment() | {
        "busy_before_percent": float(psutil.cpu_percent(interval=LOOK_AROUND_S))
    }


class ServerError(Exception):
    """The server did not start, does not answer, or did not return to its baseline.

    The message says which.
    """


@dataclass(frozen=True)
class GaugeReading:
    """One reading of the server's gauges: requests, and pages by state."""

    running: int
    waiting: int
    held: int
    cached: int
    free: int
    total: int

    def problems(self, *, idle: bool) -> list[str]:
        """The inconsistencies in words; if `idle`, no request may run, wait or hold a page."""
        found = []
        if self.held + self.cached + self.free != self.total:
            found.append(
                f"{self.held} held + {self.cached} cached + {self.free} free pages are not "
                f"{self.total}"
            )
        if idle and (self.running, self.waiting, self.held) != (0, 0, 0):
            found.append(
                f"{self.running} running, {self.waiting} waiting, {self.held} pages held: not the "
                "baseline"
            )
        return found


@dataclass(frozen=True)
class ServerProcess:
    """A running server: address, process, authorization headers, and the folder of its counts."""

    url: str
    process: subprocess.Popen[bytes]
    headers: dict[str, str]
    counts: Path | None

    def read_gauges(self) -> GaugeReading:
        """Read /metrics."""
        text = (
            httpx.get(f"{self.url}/metrics", headers=self.headers, timeout=30)
            .raise_for_status()
            .text
        )
        return books_of(text)

    def wait_until_settled(self, within_s: float) -> GaugeReading:
        """The readings once the server is back at its baseline.

        Raises `ServerError` if it is not within `within_s`.
        """
        deadline_s = time.monotonic() + within_s
        while (
            problems := (gauges := self.read_gauges()).problems(idle=True)
        ) and time.monotonic() < deadline_s:
            time.sleep(0.1)
        if problems:
            raise ServerError(f"after {within_s:.0f} s: {'; '.join(problems)}")
        return gauges

    def rss_mb(self) -> float:
        """Resident memory of the process and its children."""
        process = psutil.Process(self.process.pid)
        return (
            float(
                sum(one.memory_info().rss for one in (process, *process.children(recursive=True)))
            )
            / 1e6
        )

    def heap_mb(self) -> float:
        """What is in use of the heaps of its processes, by the last counts.

        Raises `ServerError` if there are none.
        """
        if self.counts is None:
            raise ServerError("the server does not count its heap: start it with counted=True")
        return in_use_mb(self.counts)

    def check_health(self) -> None:
        """Raises `ServerError` unless the process lives and /health says 200."""
        if self.process.poll() is not None:
            raise ServerError(f"the server ended with code {self.process.returncode}")
        status = httpx.get(f"{self.url}/health", timeout=30).status_code
        if status != 200:
            raise ServerError(f"/health says {status}")


def books_of(text: str) -> GaugeReading:
    """The readings from the Prometheus text of /metrics."""
    samples = {
        (sample.name, *sample.labels.values()): int(sample.value)
        for family in text_string_to_metric_families(text)
        if family.type == "gauge"
        for sample in family.samples
    }
    pages = {state: samples["tangram_kv_pages", state] for state in ("held", "cached", "free")}
    return GaugeReading(
        samples[("tangram_requests_running",)],
        samples[("tangram_requests_waiting",)],
        **pages,
        total=samples[("tangram_kv_pages_total",)],
    )


def serve_command(port: int, options: Sequence[str]) -> list[str]:
    """The command of a server for the embedded model."""
    command = [
        sys.executable,
        "-m",
        "tangram",
        "serve",
        MODEL,
        "--served-model-name",
        MODEL,
        "--port",
        str(port),
    ]
    return [*command, *options]


@contextmanager
def start_server(
    options: Sequence[str],
    log: IO[bytes],
    api_key: str | None = None,
    *,
    counted: bool = False,
    tree: Path | None = None,
) -> Iterator[ServerProcess]:
    """A healthy server on a free port with `options`; it is ended in any case.

    Its processes count their heaps if `counted`. With `tree` it is the package of that checkout.
    Raises `ServerError` if it does not start, or if it ends by itself.
    """
    with tempfile.TemporaryDirectory() as kept:
        counts = Path(kept) if counted else None
        yield from _start_server(options, log, api_key, counts, tree)


def _start_server(
    options: Sequence[str],
    log: IO[bytes],
    api_key: str | None,
    counts: Path | None,
    tree: Path | None,
) -> Iterator[ServerProcess]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    keys = {} if api_key is None else {"TANGRAM_API_KEY": api_key}
    variables = {**os.environ, **keys, **({} if counts is None else count_into(counts))}
    process = subprocess.Popen(
        serve_command(port, options), stdout=log, stderr=subprocess.STDOUT, env=variables, cwd=tree
    )
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    server = ServerProcess(f"http://127.0.0.1:{port}", process, headers, counts)
    try:
        _wait_until_healthy(server)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()


def _wait_until_healthy(server: ServerProcess) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        try:
            return server.check_health()
        except httpx.TransportError:
            time.sleep(0.1)
    raise ServerError(f"the server was not healthy after {START_TIMEOUT_S:.0f} s")
