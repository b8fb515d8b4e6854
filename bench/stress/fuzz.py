"""Requests that Schemathesis generates from the server's own OpenAPI document.

Run it by `make fuzz` or `python -m bench.stress.fuzz`. Three quarters of the time go to a server
without a key, the rest to one with a key.

Every answer must be one that the document names, with the status and form that it names. Requests
that break the document must be refused, others answered, and no answer may be a server error.
Afterwards the server is healthy, no page is held and its log has no exception. In the second half
of the time the heap in use may not grow by more than what caches take.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import IO

import httpx
from prometheus_client.parser import text_string_to_metric_families

from bench.stress.heap import COUNT_EVERY_S
from bench.stress.server import MODEL, ServerError, ServerProcess, start_server, surroundings

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "bench" / "results" / "http_fuzz.json"
CONFIG = Path("bench", "stress", "schemathesis.toml")
SERVER_OPTIONS = ("--kv-retention", "0.5", "--max-model-len", "1024", "--kv-cache-gib", "0.1")
SETTLED_WITHIN_S = 30.0
WORKERS = 4
REQUEST_TIMEOUT_S = 120  # a busy machine is slow, which is no failure
KEY = "sesame"
MOST_GROWTH_MB = 16.0
# Prompts that fill the pool: tokens of each, their maximum number, and the range of their
# token ids.
FILLING, MOST_FILLING, FILLING_TOKENS = 900, 32, (1_000, 40_000)


class FuzzError(Exception):
    """Schemathesis found an error; the message is its report."""


def fuzz(url: str, seconds: int, headers: dict[str, str], phases: str = "coverage,fuzzing") -> str:
    """Run Schemathesis against the server for about this time; returns its report.

    Of its `phases`, coverage tries every bound and every field by itself, and fuzzing random
    requests. Raises `FuzzError` if it found an error.
    """
    command = [
        sys.executable,
        "-m",
        "schemathesis.cli",
        "--config-file",
        str(CONFIG),
        "run",
        f"{url}/openapi.json",
        "--phases",
        phases,
        "--checks",
        "all",
        "--max-time",
        str(seconds),
        "--workers",
        str(WORKERS),
        "--request-timeout",
        str(REQUEST_TIMEOUT_S),
        "--suppress-health-check",
        "all",
        "--exclude-path",
        "/v1/kv/events",  # it never ends
        "--no-color",
        "--generation-database",
        "none",
    ]
    for name, value in headers.items():
        command += ["--header", f"{name}: {value}"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if found.returncode != 0:
        raise FuzzError(found.stdout + found.stderr)
    return found.stdout


def fill(server: ServerProcess) -> None:
    """Send prompts until every page has been used, since the first use of a page takes memory.

    Raises `ServerError` if this many prompts do not fill the pool.
    """
    prompts = (
        Random(number).choices(range(*FILLING_TOKENS), k=FILLING) for number in range(MOST_FILLING)
    )
    for prompt in prompts:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
        httpx.post(
            f"{server.url}/v1/completions", json=body, headers=server.headers, timeout=60
        ).raise_for_status()
        gauges = server.read_gauges()
        if gauges.free * 50 < gauges.total:
            return
    raise ServerError(
        f"{MOST_FILLING} prompts of {FILLING} tokens leave {gauges.free} of {gauges.total} "
        "pages free"
    )


def statuses(server: ServerProcess) -> Counter[str]:
    """The server's count of answers by status; raises `FuzzError` if one is a server error."""
    text = (
        httpx.get(f"{server.url}/metrics", headers=server.headers, timeout=30)
        .raise_for_status()
        .text
    )
    counts: Counter[str] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "tangram_http_requests_total":
                counts[sample.labels["status"]] += int(sample.value)
    errors = {status: count for status, count in counts.items() if status.startswith("5")}
    if errors:
        raise FuzzError(f"server errors, by status: {errors}")
    return counts


def check_afterwards(server: ServerProcess) -> None:
    """Raises `ServerError` unless the server is healthy and holds nothing of any request."""
    server.check_health()
    server.wait_until_settled(SETTLED_WITHIN_S)


def check_log(log: IO[bytes]) -> None:
    """Raises `FuzzError` if the log shows an exception."""
    log.seek(0)
    text = log.read().decode(errors="replace")
    if "Traceback" in text:
        raise FuzzError(
            f"the server's log shows an exception:\n{text[text.index('Traceback') :][:5000]}"
        )


def trial(seconds: int, api_key: str | None) -> tuple[dict[str, int], list[float]]:
    """Start a server, send requests for this time, and check the laws afterwards.

    Returns the number of answers by status, and the MB of the heap in use after half of the time
    and at the end.
    """
    memory = list[float]()
    with tempfile.TemporaryFile() as log:
        with start_server(SERVER_OPTIONS, log, api_key, counted=True) as server:
            fill(server)
            for part in (seconds // 2, seconds - seconds // 2):
                print(fuzz(server.url, max(1, part), server.headers))
                check_afterwards(server)
                time.sleep(2 * COUNT_EVERY_S)
                memory.append(server.heap_mb())
            counts = statuses(server)
        check_log(log)
    if (grown := memory[1] - memory[0]) > MOST_GROWTH_MB:
        raise FuzzError(
            f"memory grew by {grown:.1f} MB in the second half, at most {MOST_GROWTH_MB:g} is "
            "allowed"
        )
    return dict(sorted(counts.items())), memory


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=int, default=int(os.environ.get("FUZZ_SECONDS", "300")))
    parser.add_argument("-o", "--output", type=Path, default=RESULT)
    options = parser.parse_args()
    where = surroundings() | {"schemathesis": version("schemathesis")}
    with_key_s = max(1, options.seconds // 4)
    try:
        found = {
            "open": trial(options.seconds - with_key_s, None),
            "with a key": trial(with_key_s, KEY),
        }
    except (FuzzError, ServerError) as error:
        sys.exit(str(error))
    answers = {name: counts for name, (counts, _) in found.items()}
    print(json.dumps(answers, indent=1))
    content = {
        "command": f"FUZZ_SECONDS={options.seconds} make fuzz",
        "options": {"seconds": options.seconds},
        "environment": where,
        "answers": answers,
        "heap_mb": {name: memory for name, (_, memory) in found.items()},
    }
    options.output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
