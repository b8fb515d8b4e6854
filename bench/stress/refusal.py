"""How soon a full server refuses: `python -m bench.stress.refusal`.

Many requests run, one waits, and no more may. Then a client sends request after request on a kept
connection, and each is refused (429). With `--before FOLDER`, another checkout is measured in turns
with this one, in the same environment.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from bench.percentiles import percentiles
from bench.stress.conversations import PATH, WORDS
from bench.stress.server import MODEL, ServerError, books_of, start_server, surroundings

RESULT = Path(__file__).parents[1] / "results" / "refusal_times.json"
HERE = Path(__file__).parents[2]
SERVER_OPTIONS = ("--kv-retention", "0.5", "--max-model-len", "2048", "--max-queue", "1")
PROMPT_WORDS, HELD_TOKENS = 140, 1500
FULL_WITHIN_S = 60.0


def body(number: int, max_tokens: int) -> dict[str, Any]:
    text = " ".join(WORDS[(number + at) % len(WORDS)] for at in range(PROMPT_WORDS))
    messages = [{"role": "user", "content": text}]
    return {
        "model": MODEL,
        "messages": messages,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
    }


async def hold(client: httpx.AsyncClient, number: int) -> None:
    """Ask for a long answer and read it."""
    async with client.stream("POST", PATH, json=body(number, HELD_TOKENS)) as response:
        async for _ in response.aiter_raw():
            pass


async def ask(client: httpx.AsyncClient, number: int) -> tuple[int, float]:
    """The status of a short request, and the seconds to it."""
    begin_s = time.monotonic()
    response = await client.post(PATH, json=body(number, 1))
    return response.status_code, time.monotonic() - begin_s


async def fill(client: httpx.AsyncClient, number: int) -> asyncio.Task[None]:
    """One long request more than `number`. Raises `ServerError` if it neither runs nor waits."""
    task, begin_s = asyncio.create_task(hold(client, number)), time.monotonic()
    while time.monotonic() - begin_s < FULL_WITHIN_S:
        books = books_of((await client.get("/metrics")).text)
        if books.running + books.waiting > number:
            return task
        await asyncio.sleep(0.1)
    raise ServerError(f"after {FULL_WITHIN_S:.0f} s request {number} neither runs nor waits")


async def measure(url: str, running: int, requests: int) -> list[float]:
    """The seconds to each refusal. Raises `ServerError` if a request is not refused."""
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        held = [await fill(client, number) for number in range(running + 1)]
        answers = [await ask(client, number) for number in range(requests)]
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)
    statuses = {status for status, _ in answers}
    if statuses != {429}:
        raise ServerError(f"statuses {sorted(statuses)} instead of 429")
    return [seconds for _, seconds in answers]


def measure_tree(tree: Path, running: int, requests: int) -> dict[str, Any]:
    """One run of a server from the checkout `tree`."""
    options = (*SERVER_OPTIONS, "--max-num-seqs", str(running))
    with tempfile.TemporaryFile() as log, start_server(options, log, tree=tree) as server:
        refused_s = asyncio.run(measure(server.url, running, requests))
    shares = percentiles(refused_s)
    print(f"{tree}, {running} running: {shares}", flush=True)
    return {"running": running, "commit": commit_of(tree), "refusal_s": shares}


def commit_of(tree: Path) -> str:
    """The commit that a checkout stands at."""
    return subprocess.check_output(
        ["git", "-C", str(tree), "rev-parse", "--short=7", "HEAD"], text=True
    ).strip()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, metavar="FOLDER", help="another checkout")
    parser.add_argument("--running", type=int, nargs="+", default=[1, 32], metavar="N")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("-o", "--output", type=Path, default=RESULT)
    options = parser.parse_args()
    trees = [options.before.resolve(), HERE] if options.before else [HERE]
    where, runs = surroundings(), []
    try:
        for running in options.running:
            for _ in range(options.repeats):
                runs += [measure_tree(tree, running, options.requests) for tree in trees]
    except ServerError as error:
        sys.exit(f"the measurement failed: {error}")
    content = {
        "command": "python -m bench.stress.refusal" + (" --before FOLDER" * bool(options.before)),
        "requests": options.requests,
        "environment": where,
        "runs": runs,
    }
    options.output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
