"""The cost of the way through Ray: `python -m bench.replicas.overhead`.

`tangram serve` and `tangram deploy --replicas 1` with the same options answer the same requests,
one server after the other: the plain one, the one by Ray, and the plain one again, which shows how
much the machine has changed meanwhile. The time to the first token is that of a short prompt, one
request at a time. The throughput is of several streams at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import ray
from rich.console import Console
from rich.table import Table

from bench.replicas.bench_cluster import RESULTS
from tangram.lab.environment import environment

PORT = 18432
SHARED = ("smollm2", "--kv-cache-gib", "0.25", "--threads", "1", "--port", str(PORT))
SERVERS: dict[str, Sequence[str]] = {
    "plain": ("serve", *SHARED, "--no-page"),
    "ray": ("deploy", *SHARED, "--replicas", "1"),
    "plain again": ("serve", *SHARED, "--no-page"),
}
PROMPT, START_S = "The river carries sand from the mountains to the sea. " * 4, 600.0
STREAMS, STREAM_TOKENS = 8, 64


@contextmanager
def running(arguments: Sequence[str]) -> Iterator[httpx.AsyncClient]:
    """A client of a server that has answered once. The server ends with the block."""
    environ = os.environ | {"RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, "-m", "tangram", *arguments]
    with subprocess.Popen(
        command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as server:
        try:
            wait_until_ready(server)
            yield httpx.AsyncClient(base_url=f"http://127.0.0.1:{PORT}", timeout=600)
        finally:
            server.send_signal(signal.SIGTERM)


def wait_until_ready(server: subprocess.Popen[bytes]) -> None:
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s:
        if server.poll() is not None:
            raise SystemExit(f"the server has ended with code {server.returncode}")
        try:
            if httpx.get(f"http://127.0.0.1:{PORT}/ready", timeout=60).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise SystemExit(f"the server is not ready after {START_S} s")


async def stream(client: httpx.AsyncClient, tokens: int) -> tuple[float, int]:
    """Seconds to the first token of a stream, and how many frames with text it has."""
    body = {"model": "smollm2", "prompt": PROMPT, "stream": True, "temperature": 0}
    body |= {"max_tokens": tokens, "ignore_eos": True}
    begin_s, first_s, count = time.perf_counter(), 0.0, 0
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                first_s = first_s or time.perf_counter() - begin_s
                count += 1
    return first_s, count


async def measure(client: httpx.AsyncClient, repeats: int, requests: int) -> dict[str, list[float]]:
    """Medians of the time to a first token in ms, and tokens a second, one for each repeat."""
    found: dict[str, list[float]] = {"first_token_ms": [], "tokens_per_s": []}
    async with client:
        for _ in range(10):
            await stream(client, 2)
        for _ in range(repeats):
            times_s = [(await stream(client, 1))[0] for _ in range(requests)]
            found["first_token_ms"].append(1000 * statistics.median(times_s))
            begin_s = time.perf_counter()
            await asyncio.gather(*(stream(client, STREAM_TOKENS) for _ in range(STREAMS)))
            seconds = time.perf_counter() - begin_s
            found["tokens_per_s"].append(STREAMS * STREAM_TOKENS / seconds)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="2 repeats of 5 requests")
    parser.add_argument("--output", type=Path, default=RESULTS / "replicas_overhead.json")
    options = parser.parse_args()
    repeats, requests = (2, 5) if options.small else (5, 40)
    found: dict[str, Any] = {}
    for name, arguments in SERVERS.items():
        with running(arguments) as client:
            found[name] = asyncio.run(measure(client, repeats, requests))
    table = Table(title="through Ray, and without")
    for column in ("server", "first token, ms", "spread", "tokens/s", "spread"):
        table.add_column(column)
    for name, figures in found.items():
        cells = []
        for values in figures.values():
            cells += [f"{statistics.median(values):.1f}", f"{min(values):.1f}–{max(values):.1f}"]
        table.add_row(name, *cells)
    Console().print(table)
    content = {
        "command": "python -m bench.replicas.overhead" + (" --small" if options.small else ""),
        "environment": environment() | {"ray": ray.__version__},
        "servers": {name: " ".join(arguments) for name, arguments in SERVERS.items()},
        "streams": STREAMS,
        "figures": found,
    }
    options.output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
