"""A minute of random requests in a small pool: nothing is lost, and no answer changes."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

from engines import EngineOutcome, Request, environment, fork, prompt_of, run

SECONDS = 60
WATCHED: Request = {"prompt": prompt_of(150, 9), "max_tokens": 60}


def draw(rng: random.Random) -> Request:
    request: Request = {
        "prompt": prompt_of(rng.choice([0, 64, 130, 250]), 5) + prompt_of(rng.randrange(1, 150), 6),
        "max_tokens": rng.randrange(1, 120),
    }
    if rng.random() < 0.2:
        request["abort_after"] = rng.randrange(1, 50)
    return request


def soak(engine: dict[str, Any]) -> dict[str, Any]:
    import driver

    llm, rng = driver.start(engine), random.Random(1)
    pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    answers, lost, deadline = [], 0, time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        requests = [draw(rng) for _ in range(10)]
        requests.insert(rng.randrange(11), WATCHED)
        found = driver.run_round(llm, requests, len(answers))
        answers.append(found[requests.index(WATCHED)]["tokens"])
        lost += pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
    return {"answers": answers, "lost": lost, "counters": driver.read_counters(llm)}


def test_a_minute_in_a_small_pool(
    tiny: dict[str, Any], half: dict[str, Any], tmp_path: Path
) -> None:
    alone: EngineOutcome = run(tiny, [[WATCHED]], half)
    small = {"max_num_batched_tokens": 97, "max_model_len": 512, "num_gpu_blocks_override": 17}
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
    engine = {**tiny, **small, "speculative_config": drafts}
    found = tmp_path / "found.json"
    done = fork(lambda: found.write_text(json.dumps(soak(engine))), environment(half))
    assert done.succeeded, done.log[-4000:]
    result = json.loads(found.read_text())
    assert result["lost"] == 0
    assert result["counters"]["vllm:num_preemptions"] > 0
    assert result["counters"]["vllm:prefix_cache_hits"] > 0
    assert len(result["answers"]) > 2
    assert all(answer == alone.tokens()[0] for answer in result["answers"])
