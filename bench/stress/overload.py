"""Ten times as many askers as a server has places: `make overload`, `python -m
bench.stress.overload`.

First as many people as there are places ask without a pause, then ten times as many; all answers
are streams. Those for whom even the queue has no room are told when to come back (429,
Retry-After), and do. Who is being answered must not notice: the time from one piece of an answer to
the next, as the client sees it, may not grow beyond `MOST_SLOWER`. The exit code is 1 if it does,
or if an answer is lost.
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
import numpy as np

from bench.stress.conversations import TURN_WORDS, WORDS, Outcome, UserTurn, ask
from bench.stress.laws import latencies
from bench.stress.server import ServerError, ServerProcess, start_server, surroundings

RESULT = Path(__file__).parents[1] / "results" / "http_overload.json"
PLACES, TIMES, QUEUE = 4, 10, 16
ANSWER_TOKENS = (32, 96)  # of equal length they would all end and begin together
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


async def crowd(client: httpx.AsyncClient, people: int, seconds: float, seed: int) -> list[Outcome]:
    """What came of all requests of so many people, each of whom asks anew until the
    time is over.
    """
    outcomes, until_s = list[Outcome](), time.monotonic() + seconds

    async def person(random: Random) -> None:
        while time.monotonic() < until_s:
            start, length = random.randrange(len(WORDS)), random.randint(*TURN_WORDS)
            text = " ".join(WORDS[(start + at) % len(WORDS)] for at in range(length))
            turn = UserTurn(text, random.randint(*ANSWER_TOKENS), True, None)
            outcome = await ask(client, [{"role": "user", "content": text}], turn)
            outcomes.append(outcome)
            if outcome.retry_after_s is not None:
                await asyncio.sleep(outcome.retry_after_s)

    await asyncio.gather(*(person(Random(seed + number)) for number in range(people)))
    return outcomes


def is_refusal(outcome: Outcome) -> bool:
    """Whether the server said that too many wait, and when to come back."""
    return outcome.status == 429 and outcome.retry_after_s is not None


def figures(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What is published of one crowd; gaps are from one piece of an answer to the next, over all
    answers.
    """
    gaps_s = [gap for outcome in outcomes if outcome.kind == "answered" for gap in outcome.gaps_s]
    refused_s = [outcome.ended_s - outcome.asked_s for outcome in outcomes if is_refusal(outcome)]
    return {
        "answered": sum(outcome.kind == "answered" for outcome in outcomes),
        "refused": sum(is_refusal(outcome) for outcome in outcomes),
        "ttft_s": latencies(outcomes),
        "gap_s": {f"p{share}": float(np.percentile(gaps_s, share)) for share in (50, 90, 99)}
        if gaps_s
        else {},
        "refusal_s": {f"p{share}": float(np.percentile(refused_s, share)) for share in (50, 90, 99)}
        if refused_s
        else {},
    }


def find_broken_laws(few: Sequence[Outcome], many: Sequence[Outcome]) -> list[str]:
    """Every law that does not hold, in words: `few` are as many as there are places, `many` ten
    times as many.
    """
    found = []
    lost = [
        outcome for outcome in (*few, *many) if outcome.kind == "lost" and not is_refusal(outcome)
    ]
    if lost:
        found.append(f"{len(lost)} requests were lost, the first by {lost[0].reason}")
    if not any(is_refusal(outcome) for outcome in many):
        found.append("nobody was refused, so it was no overload")
    alone, crowded = figures(few)["gap_s"], figures(many)["gap_s"]
    if not alone or not crowded:
        return [*found, "one of the crowds was not answered at all"]
    for share, gap_s in crowded.items():
        if gap_s > MOST_SLOWER * alone[share]:
            found.append(
                f"{share} of the time between pieces was {gap_s:.3f} s in a crowd and "
                f"{alone[share]:.3f} s without, at most {MOST_SLOWER} times as much may be"
            )
    return found


async def measure_crowds(server: ServerProcess, options: argparse.Namespace) -> dict[str, Any]:
    """Both crowds, one after the other."""
    async with httpx.AsyncClient(
        base_url=server.url, timeout=600, limits=httpx.Limits(max_connections=None)
    ) as client:
        few = await crowd(client, PLACES, options.seconds, options.seed)
        many = await crowd(client, TIMES * PLACES, options.seconds, options.seed + PLACES)
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
                found = asyncio.run(measure_crowds(server, options))
                server.check_health()
                books = asdict(server.wait_until_settled(SETTLED_WITHIN_S))
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
        "afterwards": books,
    } | found
    print(json.dumps(content, indent=1))
    options.output.write_text(json.dumps(content, indent=1) + "\n")
    if found["broken"]:
        sys.exit("broken laws:\n" + "\n".join(found["broken"]))


if __name__ == "__main__":
    main()
