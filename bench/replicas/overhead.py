"""The cost of the way through Ray: `python -m bench.replicas.overhead`.

`tangram serve` and `tangram deploy --replicas 1` with the same options run side by side, and one of
them is asked at a time: the machine changes more in a minute than the way through Ray costs. The
time to the first token is that of a short prompt, one request at a time, plain and through Ray in
turns. The throughput is of several streams at once. The processor's time says which process takes
it: a server that is not asked takes nearly none.
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
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import ray
from rich.console import Console
from rich.table import Table

from bench.replicas.bench_cluster import RESULTS
from tangram_lab.environment import environment

SHARED = ("smollm2", "--kv-cache-gib", "0.25", "--threads", "1")
SERVERS: dict[str, tuple[int, Sequence[str]]] = {
    "plain": (18432, ("serve", *SHARED, "--no-page")),
    "ray": (18433, ("deploy", *SHARED, "--replicas", "1")),
}
PROMPT, START_S = "The river carries sand from the mountains to the sea. " * 4, 600.0
STREAMS, STREAM_TOKENS = 8, 64


# What a process of Ray calls itself, and what it is. The plain server is none of these.
PARTS = {
    ":Engine": "replica",
    ":Ingress": "ingress",
    "ProxyActor": "Ray's proxy",
    "ServeController": "Ray's controller",
    "ray": "Ray's other processes",
}


@contextmanager
def running(port: int, arguments: Sequence[str]) -> Iterator[psutil.Process]:
    """A server that has answered once. It ends with the block."""
    environ = os.environ | {"RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, "-m", "tangram", *arguments, "--port", str(port)]
    with subprocess.Popen(
        command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as server:
        try:
            wait_until_ready(server, port)
            yield psutil.Process(server.pid)
        finally:
            server.send_signal(signal.SIGTERM)


def wait_until_ready(server: subprocess.Popen[bytes], port: int) -> None:
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s:
        if server.poll() is not None:
            raise SystemExit(f"the server has ended with code {server.returncode}")
        try:
            if httpx.get(f"http://127.0.0.1:{port}/ready", timeout=60).status_code == 200:
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


def read_processor(server: psutil.Process) -> Counter[str]:
    """Seconds of the processor that each part of a server has taken."""
    taken = Counter[str]()
    for process in (server, *server.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            title = " ".join(process.cmdline())
            part = next((part for name, part in PARTS.items() if name in title), "server")
            times = process.cpu_times()
            taken[part] += times.user + times.system
    return taken


Figures = dict[str, dict[str, list[float]]]


async def measure(
    servers: Mapping[str, psutil.Process], repeats: int, requests: int
) -> tuple[Figures, dict[str, dict[str, float]]]:
    """Times to a first token in ms, and tokens a second, one for each repeat, of each server.

    And the processor's time in ms of a request with one token, by part.
    """
    found: Figures = {name: {"first_token_ms": [], "tokens_per_s": []} for name in servers}
    async with AsyncExitStack() as stack:
        clients = {
            name: await stack.enter_async_context(
                httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=600)
            )
            for name, (port, _) in SERVERS.items()
        }
        for client in clients.values():
            for _ in range(10):
                await stream(client, 2)
        before = {name: read_processor(server) for name, server in servers.items()}
        for _ in range(repeats * requests):
            for name, client in clients.items():
                first_s, _ = await stream(client, 1)
                found[name]["first_token_ms"].append(1000 * first_s)
        taken = {name: read_processor(server) - before[name] for name, server in servers.items()}
        for _ in range(repeats):
            for name, client in clients.items():
                begin_s = time.perf_counter()
                await asyncio.gather(*(stream(client, STREAM_TOKENS) for _ in range(STREAMS)))
                seconds = time.perf_counter() - begin_s
                found[name]["tokens_per_s"].append(STREAMS * STREAM_TOKENS / seconds)
    each = repeats * requests / 1000
    return found, {
        name: {part: seconds / each for part, seconds in parts.items()}
        for name, parts in taken.items()
    }


def compare(figures: Figures) -> dict[str, tuple[float, float, float]]:
    """Median, and the first and third quartile, of what Ray adds to the pairs: ms, and a share."""
    plain, ray_ = figures["plain"], figures["ray"]
    added = [
        theirs - ours
        for ours, theirs in zip(plain["first_token_ms"], ray_["first_token_ms"], strict=True)
    ]
    lost = [
        1 - theirs / ours
        for ours, theirs in zip(plain["tokens_per_s"], ray_["tokens_per_s"], strict=True)
    ]
    return {"added_ms": _quartiles(added), "lost_throughput": _quartiles(lost)}


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    first, middle, third = statistics.quantiles(values, n=4)
    return middle, first, third


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="2 repeats of 5 requests")
    parser.add_argument("--output", type=Path, default=RESULTS / "replicas_overhead.json")
    options = parser.parse_args()
    repeats, requests = (2, 5) if options.small else (10, 20)
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(running(port, arguments))
            for name, (port, arguments) in SERVERS.items()
        }
        found, processor_ms = asyncio.run(measure(servers, repeats, requests))
    table = Table(title="through Ray, and without: median (quartiles)")
    for column in ("server", "first token, ms", "tokens/s"):
        table.add_column(column)
    for name, figures in found.items():
        quartiles = map(_quartiles, figures.values())
        table.add_row(name, *(f"{m:.1f} ({low:.1f}–{high:.1f})" for m, low, high in quartiles))
    Console().print(table)
    differences = compare(found)
    for name, (middle, low, high) in differences.items():
        print(f"{name}: {middle:.3f} ({low:.3f} to {high:.3f})")
    for name, parts in processor_ms.items():
        spelled = ", ".join(f"{part} {ms:.1f}" for part, ms in parts.items())
        print(f"processor's ms of a request, {name}: {spelled}")
    content = {
        "command": "python -m bench.replicas.overhead" + (" --small" if options.small else ""),
        "environment": environment() | {"ray": ray.__version__},
        "servers": {name: " ".join(arguments) for name, (_, arguments) in SERVERS.items()},
        "streams": STREAMS,
        "differences": differences,
        "processor_ms": processor_ms,
        "figures": found,
    }
    options.output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
