"""The time of a routing decision: `python -m bench.routing -o FILE`.

Each replica has reported a full digest. Prompts of 32K tokens are tokenized already and their keys
known. In the case `shared` every replica holds every prompt, so that all keys are looked up
everywhere. In `own` one replica holds it, and the others its first chunk.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from tangram.routing.digest import KeyDigest
from tangram.routing.replica_choice import ReplicaReport, Router
from tangram_lab.environment import environment

CHUNKS, PROMPTS, DECISIONS, WARM_UP = 64, 40, 4000, 200
DIGEST_KEYS = 6518  # what the pool of an H200 holds of the shape of Qwen3-4B at ρ 0.25


def measure(replicas: int, *, shared: bool) -> dict[str, Any]:
    """Wall time and CPU time of `rank` and `begin`, in µs."""
    random = np.random.default_rng(replicas)
    first = random.bytes(32)
    chains = [[first, *(random.bytes(32) for _ in range(CHUNKS - 1))] for _ in range(PROMPTS)]
    router = Router()
    router.set_replicas(map(str, range(replicas)))
    for number in range(replicas):
        held = [key for chain in chains for key in chain] if shared else [first]
        if not shared:
            held += [key for chain in chains[number::replicas] for key in chain]
        held += [random.bytes(32) for _ in range(DIGEST_KEYS - len(held))]
        digest = KeyDigest.from_bytes(KeyDigest.of(held, DIGEST_KEYS).to_bytes())
        router.take_report(str(number), ReplicaReport(digest, 10, 100, 0, number % 7, 3.0, 0.5))
    wall, cpu = [], []
    for number in range(WARM_UP + DECISIONS):
        chain = chains[number % PROMPTS]
        begin_s, begin_cpu_s = time.perf_counter(), time.thread_time()
        placement = router.begin(router.rank(chain)[0], chain)
        cpu.append(time.thread_time() - begin_cpu_s)
        wall.append(time.perf_counter() - begin_s)
        router.end(placement)
    return {
        "replicas": replicas,
        "case": "shared" if shared else "own",
        "wall_us": describe(wall),
        "cpu_us": describe(cpu),
    }


def describe(seconds: list[float]) -> dict[str, float]:
    values = 1e6 * np.array(seconds[WARM_UP:])
    return {f"p{share}": float(np.percentile(values, share)) for share in (50, 99)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True)
    output = parser.parse_args().output
    runs = [
        measure(replicas, shared=shared) for replicas in (8, 64, 512) for shared in (False, True)
    ]
    for run in runs:
        print(run)
    setting = {
        "command": shlex.join(["python", "-m", "bench.routing", *sys.argv[1:]]),
        "environment": environment(),
        "chunks": CHUNKS,
        "decisions": DECISIONS,
        "digest_keys": DIGEST_KEYS,
    }
    output.write_text(json.dumps(setting | {"runs": runs}, indent=1) + "\n")
