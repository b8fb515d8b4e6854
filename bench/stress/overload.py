"""Ten times as many clients as a server can run requests.

Run it by `make overload` or `python -m bench.stress.overload`. First as many clients as the server
can run send requests without a pause, then ten times as many. All answers are streams. When the
queue is full, the others get a 429 with Retry-After, and return after that time. Running answers
must not slow down: the time between two pieces, as the client sees it, may not grow beyond
`MOST_SLOWER`. The exit code is 1 if it does, or if an answer is lost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import httpx

from bench.percentiles import percentiles
from bench.stress.conversations import TURN_WORDS, WORDS, Outcome, UserTurn, ask
from bench.stress.laws import latencies
from bench.stress.server import ServerError, ServerProcess, start_server, surroundings

RESULT = Path(__file__).parents[1] / "results" / "http_overload.json"
PLACES, TIMES, QUEUE = 4, 10, 16
ANSWER_TOKENS = (32, 96)  # with equal lengths all would end and begin together
SERVER_OPTIONS = (
    "--kv-retention",
    "0.5",
    "--max-model-len",
    "2048",
    "--max-num-seqs",
    str(PLACES),
    "--max-queue",
    str(QUEUE),
)
MOST_SLOWER = 1.5
SETTLED_WITHIN_S = 60.0


async def run_clients(
    client: httpx.AsyncClient, count: int, seconds: float, seed: int
) -> list[Outcome]:
    """The outcomes of this many clients, each of which sends requests until the time is over."""
    outcomes, until_s = list[Outcome](), time.monotonic() + seconds

    async def client_loop(random: Random) -> None:
        while time.monotonic() < until_s:
            start, length = random.randrange(len(WORDS)), random.randint(*TURN_WORDS)
            text = " ".join(WORDS[(start + at) % len(WORDS)] for at in range(length))
            turn = UserTurn(text, random.randint(*ANSWER_TOKENS), True, None)
            outcome = await ask(client, [{"role": "user", "content": text}], turn)
            outcomes.append(outcome)
            if outcome.retry_after_s is not None:
                await asyncio.sleep(outcome.retry_after_s)

    await asyncio.gather(*(client_loop(Random(seed + number)) for number in range(count)))
    return outcomes


def is_refusal(outcome: Outcome) -> bool:
    """Whether the server refused the request because the queue is full, with a time to return."""
    return outcome.status == 429 and outcome.retry_after_s is not None


def figures(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The published figures of one load; gaps are between the pieces of all answers."""
    gaps_s = [gap for outcome in outcomes if outcome.kind == "answered" for gap in outcome.gaps_s]
    refused_s = [outcome.ended_s - outcome.asked_s for outcome in outcomes if is_refusal(outcome)]
    return {
        "answered": sum(outcome.kind == "answered" for outcome in outcomes),
        "refused": sum(is_refusal(outcome) for outcome in outcomes),
        "ttft_s": latencies(outcomes),
        "gap_s": percentiles(gaps_s),
        "refusal_s": percentiles(refused_s),
    }


def find_broken_laws(few: Sequence[Outcome], many: Sequence[Outcome]) -> list[str]:
    """Every broken law, in words: `few` clients all run at once, `many` are ten times as many."""
    found = []
    lost = [
        outcome for outcome in (*few, *many) if outcome.kind == "lost" and not is_refusal(outcome)
    ]
    if lost:
        found.append(f"{len(lost)} requests were lost, the first by {lost[0].reason}")
    if not any(is_refusal(outcome) for outcome in many):
        found.append("no request was refused, so it was no overload")
    alone, overloaded = figures(few)["gap_s"], figures(many)["gap_s"]
    if not alone or not overloaded:
        return [*found, "one of the loads got no answer"]
    for share, gap_s in overloaded.items():
        if gap_s > MOST_SLOWER * alone[share]:
            found.append(
                f"{share} of the time between pieces was {gap_s:.3f} s under overload and "
                f"{alone[share]:.3f} s without, at most {MOST_SLOWER} times as much is allowed"
            )
    return found


async def measure_loads(server: ServerProcess, options: argparse.Namespace) -> dict[str, Any]:
    """Both loads, one after the other."""
    async with httpx.AsyncClient(
        base_url=server.url, timeout=600, limits=httpx.Limits(max_connections=None)
    ) as client:
        few = await run_clients(client, PLACES, options.seconds, options.seed)
        many = await run_clients(client, TIMES * PLACES, options.seconds, options.seed + PLACES)
    return {"few": figures(few), "many": figures(many), "broken": find_broken_laws(few, many)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds", type=float, default=float(os.environ.get("OVERLOAD_SECONDS", "120"))
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path, default=RESULT)
    options = parser.parse_args()
    where = surroundings()
    with tempfile.TemporaryFile() as log:
        try:
            with start_server(SERVER_OPTIONS, log) as server:
                found = asyncio.run(measure_loads(server, options))
                server.check_health()
                gauges = asdict(server.wait_until_settled(SETTLED_WITHIN_S))
        except ServerError as error:
            sys.exit(f"the overload failed: {error}")
    content = {
        "command": f"OVERLOAD_SECONDS={options.seconds:.0f} make overload",
        "options": {
            "seconds": options.seconds,
            "seed": options.seed,
            "places": PLACES,
            "people": TIMES * PLACES,
            "queue": QUEUE,
            "answer_tokens": ANSWER_TOKENS,
        },
        "environment": where,
        "afterwards": gauges,
    } | found
    print(json.dumps(content, indent=1))
    options.output.write_text(json.dumps(content, indent=1) + "\n")
    if found["broken"]:
        sys.exit("broken laws:\n" + "\n".join(found["broken"]))


if __name__ == "__main__":
    main()
