"""The Ray cluster of the benchmarks, and where they listen and write."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray
from ray import serve

RESULTS = Path(__file__).parents[1] / "results"
PORT = 18431


@contextmanager
def started_ray() -> Iterator[None]:
    """A cluster of its own on this machine; CPUs by name are more than there are."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    try:
        yield
    finally:
        serve.shutdown()
        ray.shutdown()
