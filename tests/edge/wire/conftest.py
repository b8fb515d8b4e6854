"""Servers to talk to: `fake_server` runs over an engine without a model, `server_url` is the real
thing. No torch here: most of these tests need none before they start a real server.
"""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from tangram.link.linked_engine import LinkedEngine
from tangram.serve.extension import Extension
from tangram.serve.http import build_app, transport_options
from tangram.serve.observability.tracing import Traces
from tangram.serve.options import ServerOptions, Visibility
from tangram.web.access import Access
from tangram.web.api import CacheWeb
from tangram.web.desk import WebDesk
from tests.running import run_app

from .fake_engine import FakeEngine
from .watched_engine import ObservedFakeEngine

MODEL = "fake-model"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "say it"}
REAL_START_S = 180.0


@dataclass
class EngineServer:
    """A server on the loopback and the engine behind it."""

    url: str
    engine: FakeEngine
    stop: Callable[[], None]
    linked: LinkedEngine

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=30)

    def openai(self, api_key: str = "none") -> Any:
        """The official client; untyped, because tests also send what its types forbid."""
        return OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=30)

    def chat(self, **fields: Any) -> Any:
        return self.openai().chat.completions.create(
            **{"model": MODEL, "messages": [USER], **fields}
        )

    def complete(self, **fields: Any) -> Any:
        return self.openai().completions.create(**{"model": MODEL, **fields})


def wait_until(
    condition: Callable[[], bool], what: str, timeout_s: float = 30.0, every_s: float = 0.005
) -> None:
    """Look every `every_s` until `condition` holds, else fail saying `what` did not happen."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            pytest.fail(f"after {timeout_s} s: {what}")
        time.sleep(every_s)


@contextmanager
def run_fake_server(
    *api_keys: str,
    max_queue: int | None = None,
    traces: Traces | None = None,
    engine: FakeEngine | None = None,
    linked: LinkedEngine | None = None,
    web: Extension | None = None,
    **options: Any,
) -> Iterator[EngineServer]:
    """A real uvicorn on a free port, in a thread; `options` are fields of `ServerOptions`."""
    engine = engine or FakeEngine()
    linked = linked or LinkedEngine(engine)
    app = build_app(
        linked,
        served_model_name=MODEL,
        options=ServerOptions(api_key=api_keys, **options),
        max_queue=max_queue,
        traces=traces,
        web=web,
    )
    with run_app(app, **transport_options()) as running:
        yield EngineServer(running.url, engine, running.stop, linked)


@contextmanager
def run_page_server(
    *api_keys: str,
    visibility: Visibility = Visibility.auto,
    host: str = "127.0.0.1",
    change: Callable[[WebDesk], object] = lambda desk: None,
) -> Iterator[EngineServer]:
    """A server with the page, over the engine without a model."""
    engine = ObservedFakeEngine()
    desk = WebDesk(engine, MODEL)
    change(desk)
    linked = LinkedEngine(engine, desk)
    web = CacheWeb(linked, Access(visibility, host))
    with run_fake_server(*api_keys, engine=engine, linked=linked, web=web) as server:
        yield server


@pytest.fixture
def fake_server() -> Iterator[EngineServer]:
    with run_fake_server() as server:
        yield server


@pytest.fixture(scope="module")
def shared_server() -> Iterator[EngineServer]:
    """One for many tests, which must not mind what the others did."""
    with run_fake_server() as server:
        yield server


@pytest.fixture
def locked_server() -> Iterator[EngineServer]:
    """A server whose API keys are 'sesame' and 'poppy'."""
    with run_fake_server("sesame", "poppy") as server:
        yield server


def chat_body(**fields: Any) -> dict[str, Any]:
    """A small valid body of POST /v1/chat/completions, with `fields` on top."""
    return {"model": MODEL, "messages": [USER], "max_tokens": 20, **fields}


def stream_data(response: httpx.Response) -> list[str]:
    """The data of each server-sent event."""
    return [line.removeprefix("data: ") for line in response.iter_lines() if line]


def join_calls(pieces: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The calls of one answer, from what `delta.tool_calls` had of them."""
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        if piece.get("id"):
            calls.append({**piece, "function": dict(piece["function"])})
        else:
            calls[-1]["function"]["arguments"] += piece["function"]["arguments"]
        assert piece["index"] == len(calls) - 1
    return calls


def scrape(client: httpx.Client) -> dict[tuple[str, str], float]:
    """(sample name, label values) → value of everything on /metrics, as Prometheus reads it."""
    text = client.get("/metrics").text
    samples = [
        sample for family in text_string_to_metric_families(text) for sample in family.samples
    ]
    return {(sample.name, ",".join(sample.labels.values())): sample.value for sample in samples}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def healthy(url: str) -> bool:
    """Whether the server there answers /health with 200."""
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


@contextmanager
def run_real_server(*options: str, python: Sequence[str]) -> Iterator[str]:
    """The real server with the embedded model in a process of its own; its address."""
    port = free_port()
    command = [*python, "-m", "tangram", "serve", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--kv-retention", "0.5", "--served-model-name", "smollm2"]
    with subprocess.Popen([*command, *options]) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until(
                lambda: process.poll() is not None or healthy(url),
                "the real server is not healthy",
                REAL_START_S,
            )
            if process.poll() is not None:
                pytest.fail(
                    f"the real server ended with code {process.returncode} before it was healthy"
                )
            yield url
        finally:
            process.terminate()
            process.wait(timeout=30)


@pytest.fixture(scope="session")
def server_url(python: list[str]) -> Iterator[str]:
    """The real server, once per test run."""
    with run_real_server(python=python) as url:
        yield url
