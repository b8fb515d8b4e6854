"""Ray's own commands on a real cluster: `serve run`, and `serve deploy` of a config file."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.edge.wire.ray_cluster import (
    ENVIRONMENT,
    PATIENCE_S,
    Cluster,
    is_open,
    ray_cluster,
    wait_patiently,
)

pytestmark = pytest.mark.nightly
SERVE = [sys.executable, "-m", "ray.serve.scripts"]
SERVE_PORT = 8000  # of a cluster that nobody told another one
ARGUMENTS: dict[str, Any] = {
    **{"model": "smollm2", "threads": 1, "kv_cache_gib": 0.25, "cpus_per_replica": 0.5},
    **{"chunk_tokens": 256, "max_num_batched_tokens": 512},
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with ray_cluster(tmp_path_factory.mktemp("ray"), dashboard=True) as cluster:
        yield cluster


def test_serve_run_takes_options_as_arguments(cluster: Cluster, tmp_path: Path) -> None:
    if is_open(SERVE_PORT):
        pytest.skip(f"another program listens at port {SERVE_PORT}")
    given = [f"{name}={value}" for name, value in ARGUMENTS.items()]
    command = [*SERVE, "run", "--address", cluster.address, "tangram.ray:app", *given]
    with (tmp_path / "run.log").open("w") as log:
        running = subprocess.Popen(
            [*command, "replicas=2"], env=ENVIRONMENT, stdout=log, stderr=log
        )
        here = Cluster(cluster.main, cluster.address, SERVE_PORT, cluster.dashboard)
        wait_patiently(lambda: ready(here) or running.poll() is not None, "the application")
        assert running.poll() is None, (tmp_path / "run.log").read_text()
        wait_patiently(lambda: here.metrics("tangram_replicas") == {"": 2.0}, "both replicas")
        assert here.complete("Once upon a time")["choices"][0]["text"]
        page = httpx.get(here.url, timeout=PATIENCE_S)
        running.send_signal(signal.SIGINT)
        running.wait(PATIENCE_S)
    assert page.status_code == 200
    assert "Tangram" in page.text
    wait_patiently(lambda: not is_open(SERVE_PORT), "the end of the application")


def test_a_config_file_is_deployed_and_scales_with_the_load(
    cluster: Cluster, tmp_path: Path
) -> None:
    scale = {
        **{"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 1},
        **{"upscale_delay_s": 0.5, "downscale_delay_s": 2.0, "metrics_interval_s": 0.5},
    }
    application = {
        **{"name": "tangram", "import_path": "tangram.ray:app"},
        "args": ARGUMENTS | {"autoscaling": scale},
    }
    listens = {"host": "127.0.0.1", "port": cluster.port}
    config = tmp_path / "serve.yaml"  # JSON is YAML, too
    config.write_text(json.dumps({"http_options": listens, "applications": [application]}))
    deployed = subprocess.run(
        [*SERVE, "deploy", "--address", cluster.dashboard, str(config)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert deployed.returncode == 0, deployed.stderr
    wait_patiently(lambda: ready(cluster), "the application")
    expected = cluster.complete("Once upon a time", 32)["choices"][0]["text"]
    with ThreadPoolExecutor(4) as clients:
        asked = [clients.submit(answer_until_two, cluster, expected) for _ in range(4)]
        for one in asked:
            one.result(PATIENCE_S)
    wait_patiently(lambda: cluster.metrics("tangram_replicas") == {"": 1.0}, "one replica")
    assert cluster.complete("Once upon a time", 32)["choices"][0]["text"] == expected


def answer_until_two(cluster: Cluster, expected: str) -> None:
    """Ask again and again until there are two replicas."""
    while cluster.metrics("tangram_replicas") != {"": 2.0}:
        assert cluster.complete("Once upon a time", 32)["choices"][0]["text"] == expected


def ready(cluster: Cluster) -> bool:
    try:
        return httpx.get(f"{cluster.url}/ready", timeout=30).status_code == 200
    except httpx.HTTPError:
        return False
