"""What HTTP servers cost, and what they make of strange clients: `python -m
bench.serving.asgi_servers`.

One small application is served by Tangram's server and by others, each with the strictest bounds
that it has. Clients are processes of their own. The processor's time of a server's processes is
divided by the events of streams, or by the requests, that they answered. A server that is not
installed is skipped: `pip install granian hypercorn httptools zttp`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from bench.serving.asgi_app import HOST, SERVERS, TICK_S, Running, run_server
from bench.serving.asgi_trials import TRIALS, HttpTrial
from tangram_lab.environment import environment

RESULT = Path(__file__).parents[1] / "results" / "asgi_servers.json"
EVENT_BYTES = 200
CLIENTS = 2
Client = Callable[[int, int, int], Coroutine[Any, Any, int]]


def find_version(name: str) -> str | None:
    """The version of the server `name`, of uvicorn where it is part of it; None: not installed."""
    package = SERVERS[name][0]
    try:
        return version(package or "uvicorn")
    except PackageNotFoundError:
        return None


async def follow_streams(port: int, streams: int, events: int) -> int:
    """So many streams at once; the events that came."""
    return sum(await asyncio.gather(*(_follow(port, events) for _ in range(streams))))


async def _follow(port: int, events: int) -> int:
    reader, writer = await asyncio.open_connection(HOST, port)
    body = json.dumps({"events": events, "bytes": EVENT_BYTES}).encode()
    writer.write(_head("/stream", body, "Connection: close") + body)
    came, rest = 0, b""
    while part := await reader.read(1 << 16):
        came += (rest + part).count(b"data: ")
        rest = part[-5:]
    writer.close()
    return came


async def send_requests(port: int, connections: int, requests: int) -> int:
    """So many requests on each connection, one after the other; the answers that came."""
    return sum(await asyncio.gather(*(_ask(port, requests) for _ in range(connections))))


async def _ask(port: int, requests: int) -> int:
    reader, writer = await asyncio.open_connection(HOST, port)
    body = json.dumps({"text": "x" * EVENT_BYTES}).encode()
    for _ in range(requests):
        writer.write(_head("/json", body, "Connection: keep-alive") + body)
        await reader.readuntil(b"}")
    writer.close()
    return requests


def _head(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", f"Host: {HOST}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode()


def run_client(client: Client, *arguments: int) -> int:
    """All of one process."""
    return asyncio.run(client(*arguments))


def measure(
    pool: Pool, at: Running, client: Client, connections: int, each: int
) -> dict[str, float]:
    """Microseconds of the processor for each event or request, and how many came a second."""
    share = (client, at.port, connections // CLIENTS, each)
    pool.starmap(run_client, [(client, at.port, 2, 8)] * CLIENTS)
    before_s, begin_s = _read_cpu_s(at.process), time.monotonic()
    came = sum(pool.starmap(run_client, [share] * CLIENTS))
    seconds, used_s = time.monotonic() - begin_s, _read_cpu_s(at.process) - before_s
    if came != connections // CLIENTS * CLIENTS * each:
        raise SystemExit(f"{came} came of {connections} × {each}")
    return {"us": 1e6 * used_s / came, "per_s": came / seconds}


def _read_cpu_s(process: psutil.Process) -> float:
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return float(sum(one.user + one.system for one in times))


def try_all(names: list[str]) -> list[dict[str, Any]]:
    """What each server made of each trial. They wait for one another's time limits: all at once."""
    with ExitStack() as stack, ThreadPoolExecutor(len(names) * len(TRIALS)) as pool:
        shared = {name: stack.enter_context(run_server(name)) for name in names}
        found = {
            trial.what: {name: pool.submit(_try, trial, name, shared[name]) for name in names}
            for trial in TRIALS
        }
        return [
            {"what": trial.what, "right": trial.right, "why": trial.why}
            | {"found": {name: one.result() for name, one in found[trial.what].items()}}
            for trial in TRIALS
        ]


def _try(trial: HttpTrial, name: str, shared: Running) -> str:
    if not trial.ends:
        return trial.run(shared)
    with run_server(name) as own:
        return trial.run(own)


def main() -> None:
    """Measure, try, keep what was found, print two tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=64, help="at once; JSON: a quarter of them")
    parser.add_argument("--events", type=int, default=400, help="of each stream, one a tick")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--others", default="", help="what else ran on this machine meanwhile")
    parser.add_argument("-o", "--output", type=Path, default=RESULT)
    options = parser.parse_args()
    for name in SERVERS:
        if find_version(name) is None:
            print(f"{name} is skipped: {SERVERS[name][0]} is not installed")
    names = [name for name in SERVERS if find_version(name) is not None]
    loads: dict[str, tuple[Client, int]] = {
        "event": (follow_streams, options.streams),
        "request": (send_requests, options.streams // 4),
    }
    runs: dict[str, Any] = {name: {of: [] for of in loads} for name in names}
    with multiprocessing.get_context("spawn").Pool(CLIENTS) as pool:
        for name in names * options.repeats:
            with run_server(name) as at:
                for of, (client, connections) in loads.items():
                    runs[name][of].append(measure(pool, at, client, connections, options.events))
    content = {
        "command": shlex.join(["python", "-m", "bench.serving.asgi_servers", *sys.argv[1:]]),
        "environment": environment(),
        "others": options.others,
        "tick_ms": 1e3 * TICK_S,
        **{"streams": options.streams, "events": options.events, "event_bytes": EVENT_BYTES},
        "servers": [{"name": name, "version": find_version(name), **runs[name]} for name in names],
        "trials": try_all(names),
    }
    options.output.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    _print(content)


def _print(content: Any) -> None:
    costs = Table("server", "µs an event", "µs a request", "requests/s", title="median (range)")
    for server in content["servers"]:
        columns = [(server["event"], "us"), (server["request"], "us"), (server["request"], "per_s")]
        costs.add_row(server["name"], *(_spread([run[of] for run in runs]) for runs, of in columns))
    names = [server["name"] for server in content["servers"]]
    trials = Table("trial", "right", *names)
    for trial in content["trials"]:
        found = [trial["found"][name] for name in names]
        marked = [one if one in trial["right"] else f"[red]{one}[/red]" for one in found]
        trials.add_row(trial["what"], " or ".join(trial["right"]), *marked)
    Console(width=200).print(costs, trials)


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.0f} ({min(values):.0f}–{max(values):.0f})"


if __name__ == "__main__":
    main()
