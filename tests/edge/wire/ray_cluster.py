"""A Ray cluster on this machine, for tests: `tangram deploy` joins it, and nothing of it stays."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.edge.wire.conftest import free_port, wait_until

# Another process may compute on the same cores, so everything is waited for patiently.
PATIENCE_S = 600.0
# The token is the cluster's own, whatever lies in the home folder.
ENVIRONMENT = os.environ | {
    **{"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"},
    **{"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)},
}
OPTIONS = (
    *("--kv-cache-gib", "0.25", "--threads", "1", "--chunk-tokens", "256"),
    *("--max-num-batched-tokens", "512", "--cpus-per-replica", "0.5"),
)


@dataclass
class Cluster:
    """`main` is the process of `ray start --block`; the application listens at `url`.

    `dashboard` is where Ray's REST API listens, if it does.
    """

    main: psutil.Process
    address: str
    port: int
    dashboard: str

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def deploy(self, *options: str) -> None:
        """Deploy the embedded model, or replace what is deployed."""
        command = [sys.executable, "-m", "tangram", "deploy", "smollm2", *OPTIONS, *options]
        place = ["--address", self.address, "--detach", "--port", str(self.port)]
        ended = subprocess.run(
            [*command, *place], env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert ended.returncode == 0, ended.stderr

    def complete(self, prompt: str | list[str], tokens: int = 8, **fields: Any) -> Any:
        """Greedy answers to one prompt or several."""
        body = {"model": "smollm2", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        answer = httpx.post(f"{self.url}/v1/completions", json=body | fields, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def metrics(self, name: str) -> dict[str, float]:
        """The series `name` by the replica that labels it; "" if none does."""
        text = httpx.get(f"{self.url}/metrics", timeout=PATIENCE_S).text
        found = re.findall(rf'^{name}(?:{{replica="(\w+)"}})? (\S+)$', text, re.MULTILINE)
        return {replica: float(value) for replica, value in found}

    def engines(self) -> list[psutil.Process]:
        """The processes of the replicas."""
        return [one for one in self.processes() if ":Engine" in " ".join(_command(one))]

    def processes(self) -> list[psutil.Process]:
        return [self.main, *self.main.children(recursive=True)]


def _command(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return list(process.cmdline())
    return []


def wait_patiently(condition: Callable[[], bool], what: str) -> None:
    """`wait_until` for what takes long on busy cores."""
    wait_until(condition, f"{what} has not come", PATIENCE_S, every_s=0.2)


@contextmanager
def ray_cluster(folder: Path, *, dashboard: bool = False) -> Iterator[Cluster]:
    """A cluster of eight CPUs, by name. At the end all of its processes are gone, or it fails."""
    port, dashboard_port = free_port(), free_port()
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
    shown = f"--include-dashboard={str(dashboard).lower()}"
    options = ["--num-cpus=8", shown, f"--dashboard-port={dashboard_port}", "--disable-usage-stats"]
    with (folder / "ray.log").open("w") as log:
        started = subprocess.Popen(
            [*command, *options, f"--port={port}"], env=ENVIRONMENT, stdout=log, stderr=log
        )
    main = psutil.Process(started.pid)
    address = f"http://127.0.0.1:{dashboard_port}"
    cluster = Cluster(main, f"127.0.0.1:{port}", free_port(), address)
    try:
        wait_patiently(lambda: is_open(port), "the cluster")
        yield cluster
    finally:
        all_processes = cluster.processes()
        started.send_signal(signal.SIGTERM)
        started.wait(PATIENCE_S)
        _, left = psutil.wait_procs(all_processes, timeout=60)
        for process in left:
            process.kill()
        assert not left, f"processes of the cluster are left: {[_command(one) for one in left]}"


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
