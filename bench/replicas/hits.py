"""Reuse of prefixes by three replicas: `python -m bench.replicas.hits`.

Conversations of several turns are asked over HTTP, a few at a time, in an order that changes with
each turn. The prompt of a turn begins with that of the turn before. The hit share is the share of
all prompt tokens that a prefix cache had. Three replicas with our routing stand beside the same
three in turn, and beside one replica with the memory of all three.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import ray
from ray import serve
from rich.console import Console
from rich.table import Table

from bench.bare_tokenizer import load_tokenizer
from bench.replicas.bench_cluster import PORT, RESULTS, started_ray
from tangram.calibrate.texts import make_texts
from tangram.config import EngineConfig
from tangram.ray.application import ROUTER, build_application
from tangram.serve.options import FleetOptions
from tangram_lab.environment import environment

REPLICAS, AT_ONCE, ANSWER_TOKENS = 3, 4, 4
FIRST_TOKENS, TURN_TOKENS, CHUNK_TOKENS = 1200, 400, 256


@dataclass(frozen=True)
class Arm:
    """One way to serve the load."""

    name: str
    replicas: int
    gib: float
    router: str


ARMS = (
    Arm("three replicas, routed by chunks", REPLICAS, 0.25, ROUTER),
    Arm("three replicas in turn", REPLICAS, 0.25, "bench.replicas.round_robin:RoundRobinRouter"),
    Arm("one replica that holds all", 1, REPLICAS * 0.25, ROUTER),
)


@dataclass(frozen=True)
class Reuse:
    """Tokens of all prompts, those that were cached, the seconds, and requests by replica."""

    prompt_tokens: int
    cached_tokens: int
    seconds: float
    prompt_tokens_by_replica: list[float]

    @property
    def share(self) -> float:
        return self.cached_tokens / self.prompt_tokens


def make_conversations(count: int, turns: int) -> list[list[int]]:
    """The tokens of each conversation's last prompt."""
    tokenizer, tokens = load_tokenizer("smollm2"), FIRST_TOKENS + (turns - 1) * TURN_TOKENS
    texts = make_texts(count, min_characters=8 * tokens)
    return [tokenizer.encode(f"{at}. {text}")[:tokens] for at, text in enumerate(texts)]


async def ask_all(conversations: Sequence[list[int]], turns: int) -> Reuse:
    """Ask turn after turn, `AT_ONCE` conversations at a time."""
    usages: list[dict[str, Any]] = []
    places, order = asyncio.Semaphore(AT_ONCE), list(conversations)
    shuffle = random.Random(0).shuffle
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{PORT}", timeout=600) as client:

        async def ask(prompt: list[int]) -> None:
            body = {"model": "smollm2", "prompt": prompt, "max_tokens": ANSWER_TOKENS}
            async with places:
                answer = await client.post("/v1/completions", json=body | {"temperature": 0})
            usages.append(answer.raise_for_status().json()["usage"])

        begin_s = time.perf_counter()
        for turn in range(turns):
            shuffle(order)
            length = FIRST_TOKENS + turn * TURN_TOKENS
            await asyncio.gather(*(ask(tokens[:length]) for tokens in order))
        seconds = time.perf_counter() - begin_s
        await asyncio.sleep(2.5)  # replicas report every second
        lines = (await client.get("/metrics")).text.splitlines()
    by_replica = [
        float(line.split()[-1]) for line in lines if line.startswith("tangram_replica_prompt_to")
    ]
    return Reuse(
        sum(usage["prompt_tokens"] for usage in usages),
        sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages),
        seconds,
        by_replica,
    )


def measure(arm: Arm, conversations: Sequence[list[int]], turns: int) -> Reuse:
    """The outcome of one arm, by replicas that have seen nothing."""
    config = EngineConfig(
        kv_cache_gib=arm.gib,
        threads=1,
        chunk_tokens=CHUNK_TOKENS,
        max_num_batched_tokens=512,
        max_queue=1024,
    )
    options = FleetOptions(replicas=arm.replicas, cpus_per_replica=0.5)
    serve.run(build_application(config, options, arm.router), name="bench")
    try:
        return asyncio.run(ask_all(conversations, turns))
    finally:
        serve.delete("bench")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="6 conversations of 2 turns")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS / "replicas_hits.json")
    options = parser.parse_args()
    count, turns = (6, 2) if options.small else (24, 4)
    conversations = make_conversations(count, turns)
    outcomes: dict[str, list[Reuse]] = {arm.name: [] for arm in ARMS}
    with started_ray():
        for _ in range(options.repeats):
            for arm in ARMS:
                outcomes[arm.name].append(measure(arm, conversations, turns))
    best = outcomes[ARMS[-1].name][0].share
    table = Table(title=f"{count} conversations of {turns} turns")
    for column in ("replicas", "hit share", "of one that holds all", "s"):
        table.add_column(column)
    for name, found in outcomes.items():
        first = found[0]
        table.add_row(
            name, f"{first.share:.3f}", f"{first.share / best:.3f}", f"{first.seconds:.0f}"
        )
    Console().print(table)
    content = {
        "command": "python -m bench.replicas.hits" + (" --small" if options.small else ""),
        "environment": environment() | {"ray": ray.__version__},
        "load": {"conversations": count, "turns": turns, "at_once": AT_ONCE},
        "arms": [asdict(arm) for arm in ARMS],
        "outcomes": {name: [asdict(one) for one in found] for name, found in outcomes.items()},
    }
    options.output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
