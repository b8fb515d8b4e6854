"""The ingress: the server of one engine, whose engine is a fleet of replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fastapi import FastAPI
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from ray.serve.handle import DeploymentHandle

from tangram.metrics import EngineStats
from tangram.ray.logs import log_in_worker
from tangram.ray.payloads import FactsQuestion
from tangram.ray.replicated_engine import ReplicatedEngine
from tangram.serve.http import build_app
from tangram.serve.observability.exposition import make_family
from tangram.serve.options import FleetOptions
from tangram.web.chat_alone import ChatWeb

_GAUGES = (
    ("running", "Requests in the batch of a replica", "running"),
    ("waiting", "Requests in the queue of a replica", "waiting"),
    ("kv_pages_free", "Pages of a replica that hold nothing", "pages_free"),
    ("prompt_tokens", "Prompt tokens that a replica has admitted", "prompt_tokens"),
    ("cached_prompt_tokens", "Those of them that its prefix cache had", "cached_tokens"),
)


class Ingress:
    """Parses and tokenizes requests, has them answered by `replicas`, and writes the answers.

    Ray Serve builds it in a process of its own and calls `__serve_build_asgi_app__` once.
    """

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, replicas: DeploymentHandle[Any], model: str, options: FleetOptions, version: str
    ) -> None:
        log_in_worker(options.log_format)
        self._model, self._options = model, options
        # In a redeploy this waits for engines of the same deployment: older ones have other facts.
        facts = await replicas.describe.remote(FactsQuestion(version))
        first = await replicas.report.remote()
        most = facts.config.max_queue
        self._max_queue = None if most is None else most * options.most_replicas
        self._fleet = ReplicatedEngine(replicas, facts, first)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """The application of `tangram serve`; its web page has conversations and no cache."""
        app = build_app(
            self._fleet,
            served_model_name=self._model,
            options=self._options,
            max_queue=self._max_queue,
            web=ChatWeb(),
        )
        app.state.service.metrics.registry.register(_ReplicaCollector(lambda: self._fleet.replicas))
        return app


class _ReplicaCollector(Collector):
    """The series of single replicas; those of `tangram_…` alone are their sums."""

    def __init__(self, replicas: Callable[[], Mapping[str, EngineStats]]) -> None:
        self._replicas = replicas

    def collect(self) -> Iterator[Metric]:
        replicas = self._replicas()
        yield GaugeMetricFamily("tangram_replicas", "Replicas that answer", value=len(replicas))
        for name, text, field in _GAUGES:
            values = [([replica], getattr(stats, field)) for replica, stats in replicas.items()]
            name = f"tangram_replica_{name}"
            yield make_family(GaugeMetricFamily, name, text, values, ["replica"])
