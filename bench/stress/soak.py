"""Conversations with a server of the embedded model for a long time.

Run it by `make soak` or `python -m bench.stress.soak`. First a closed loop measures the turns per
second that the server can answer. Then conversations arrive at random (Poisson) at 0.9 of that
rate. Some clients disconnect, streaming or not.

Laws (`laws.py`): every turn is answered whole, unless its client disconnected. Pages add up in
every sample, and none is held at the end. The heap in use is flat. Some answers, requested again
alone, are the same texts. The exit code is 1 if a law is broken.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.progress import Progress

from bench.stress.conversations import Outcome, UserTurn, ask, conversation, hold, mean_turns
from bench.stress.laws import ServerSample, find_broken_laws, growth, summary
from bench.stress.server import ServerError, ServerProcess, books_of, start_server, surroundings
from tangram.cli.console import progress

RESULT = Path(__file__).parents[1] / "results" / "http_soak.json"
# A small pool is full soon. Pages are then taken from the prefix cache, and no memory is used
# first.
SERVER_OPTIONS = ("--kv-retention", "0.5", "--max-model-len", "2048", "--kv-cache-gib", "0.25")
LOAD = 0.9
SAMPLE_EVERY_S = 1.0
SETTLED_WITHIN_S = 60.0
MOST_ASKED_AGAIN = 20
OUTSIDE_S = 240.0  # the start, the last answers of both phases, the answers again, and the end
NO_BOUND = httpx.Limits(max_connections=None)


class Clients:
    """The clients; `outcomes` are those of their turns, in the order in which they ended."""

    def __init__(self, client: httpx.AsyncClient, seed: int) -> None:
        self._client, self._random = client, Random(seed)
        self.outcomes: list[Outcome] = []

    async def converse(self, until_s: float) -> None:
        """One conversation, to its end or to the first answer after a monotonic time."""
        async for outcome in hold(self._client, conversation(self._random)):
            self.outcomes.append(outcome)
            if time.monotonic() >= until_s:
                return

    async def closed_loop(self, count: int, until_s: float) -> None:
        """This many clients, each with one conversation after the other, until a monotonic time."""

        async def client_loop() -> None:
            while time.monotonic() < until_s:
                await self.converse(until_s)

        await asyncio.gather(*(client_loop() for _ in range(count)))

    async def arrivals(self, conversations_per_s: float, until_s: float) -> None:
        """Conversations that begin at random at a mean rate until a time; waits for answers."""
        async with asyncio.TaskGroup() as tasks:
            next_s = time.monotonic()
            while next_s < until_s:
                await asyncio.sleep(max(0.0, next_s - time.monotonic()))
                tasks.create_task(self.converse(until_s))
                next_s += self._random.expovariate(conversations_per_s)


async def capacity(clients: Clients, count: int, seconds: float) -> float:
    """Turns per second of `count` clients without pauses, after a third of the time.

    First turns are short and find an empty pool, so the rate at the beginning is too high.
    """
    begin_s = time.monotonic()
    await clients.closed_loop(count, begin_s + seconds)
    from_s, to_s = begin_s + seconds / 3, begin_s + seconds
    counted = [one for one in clients.outcomes if from_s <= one.ended_s < to_s]
    if not counted:
        raise ServerError(f"no turn ended in {seconds:.0f} s: measure the capacity for longer")
    return len(counted) / (to_s - from_s)


async def watch(
    client: httpx.AsyncClient, server: ServerProcess, begin_s: float, samples: list[ServerSample]
) -> None:
    """A sample of the server every `SAMPLE_EVERY_S`, until it is cancelled."""
    while True:
        text = (await client.get("/metrics")).raise_for_status().text
        samples.append(
            ServerSample(
                time.monotonic() - begin_s, server.rss_mb(), server.heap_mb(), books_of(text)
            )
        )
        await asyncio.sleep(SAMPLE_EVERY_S)


@asynccontextmanager
async def show_time(bars: Progress, phase: str, seconds: float) -> AsyncIterator[None]:
    """A bar of a phase that takes `seconds` and then waits for the last answers."""
    bar, begin_s = bars.add_task(phase, total=seconds), time.monotonic()

    async def move() -> None:
        while True:
            bars.update(bar, completed=min(seconds, time.monotonic() - begin_s))
            await asyncio.sleep(SAMPLE_EVERY_S)

    moving = asyncio.create_task(move())
    try:
        yield
    finally:
        moving.cancel()
        bars.update(bar, completed=seconds)


async def ask_again(
    client: httpx.AsyncClient, outcomes: Sequence[Outcome], random: Random, bars: Progress
) -> tuple[int, int]:
    """The number of answers requested again, one at a time, and how many of them differ."""
    answered = [one for one in outcomes if one.kind == "answered"]
    chosen, changed = random.sample(answered, min(MOST_ASKED_AGAIN, len(answered))), 0
    for before in bars.track(chosen, description="answers again"):
        turn = UserTurn("", before.answer_tokens, stream=not before.stream, patience_s=None)
        after = await ask(client, before.messages, turn)
        changed += after.kind != "answered" or after.text != before.text
    return len(chosen), changed


async def completions(client: httpx.AsyncClient) -> dict[str, int]:
    """The server's count of completions, by how they ended."""
    text = (await client.get("/metrics")).raise_for_status().text
    return {
        sample.labels["finish_reason"]: int(sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "tangram_completions_total"
    }


async def soak(
    server: ServerProcess, options: argparse.Namespace, bars: Progress
) -> dict[str, Any]:
    """The whole soak; returns its figures, with the broken laws under `broken`."""
    async with (
        httpx.AsyncClient(base_url=server.url, timeout=600, limits=NO_BOUND) as client,
        httpx.AsyncClient(base_url=server.url, timeout=60) as watcher,
    ):
        first = Clients(client, options.seed)
        async with show_time(bars, "capacity", options.capacity_seconds):
            turns_per_s = await capacity(first, options.people, options.capacity_seconds)
        print(f"capacity: {turns_per_s:.2f} turns/s", flush=True)
        clients, samples, begin_s = (
            Clients(client, options.seed + 1),
            list[ServerSample](),
            time.monotonic(),
        )
        watching = asyncio.create_task(watch(watcher, server, begin_s, samples))
        async with show_time(bars, "conversations", options.seconds):
            await clients.arrivals(LOAD * turns_per_s / mean_turns(), begin_s + options.seconds)
        took_s = time.monotonic() - begin_s
        watching.cancel()
        ends = await completions(client)
        again, changed = await ask_again(client, clients.outcomes, Random(options.seed), bars)
    everything, heap = [*first.outcomes, *clients.outcomes], growth(samples, "heap_mb")
    return {
        "capacity_turns_per_s": turns_per_s,
        "offered_turns_per_s": LOAD * turns_per_s,
        "answered_turns_per_s": len(clients.outcomes) / took_s,
        "lost_while_measuring_capacity": sum(one.kind == "lost" for one in first.outcomes),
        **summary(clients.outcomes, samples),
        "ttfts": [
            [round(one.asked_s - begin_s, 1), round(one.ttft_s, 3)]
            for one in clients.outcomes
            if one.ttft_s is not None
        ],
        "asked_again": again,
        "asked_again_and_changed": changed,
        "completions": ends,
        "broken": find_broken_laws(everything, samples, heap, ends, changed),
    }


def afterwards(server: ServerProcess) -> tuple[dict[str, int], list[str]]:
    """The readings when no client is left, and the inconsistencies of the server then."""
    try:
        server.check_health()
        return asdict(server.wait_until_settled(SETTLED_WITHIN_S)), []
    except ServerError as error:
        return asdict(server.read_gauges()), [str(error)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds", type=float, default=float(os.environ.get("SOAK_SECONDS", "1200"))
    )
    parser.add_argument("--capacity-seconds", type=float, default=180.0)
    parser.add_argument(
        "--people", type=int, default=16, help="clients while the capacity is measured"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path, default=RESULT)
    options = parser.parse_args()
    where = surroundings()
    minutes = (options.capacity_seconds + options.seconds + OUTSIDE_S) / 60
    print(f"takes some {minutes:.0f} minutes on two cores", flush=True)
    with tempfile.TemporaryFile() as log, progress(counted=False) as bars:
        try:
            with start_server(SERVER_OPTIONS, log, counted=True) as server:
                found = asyncio.run(soak(server, options, bars))
                found["afterwards"], wrong = afterwards(server)
                found["broken"] += wrong
        except ServerError as error:
            sys.exit(f"the soak failed: {error}")
    shown = {name: value for name, value in vars(options).items() if name != "output"}
    content = {
        "command": f"SOAK_SECONDS={options.seconds:.0f} make soak",
        "options": shown,
        "environment": where,
    } | found
    options.output.write_text(json.dumps(content) + "\n")
    print(
        json.dumps(
            {name: value for name, value in content.items() if name not in ("samples", "ttfts")},
            indent=1,
        )
    )
    if found["broken"]:
        sys.exit("broken laws:\n" + "\n".join(found["broken"][:20]))


if __name__ == "__main__":
    main()
