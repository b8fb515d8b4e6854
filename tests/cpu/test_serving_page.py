"""docs/serving.md says what the result files say."""

from __future__ import annotations

from typing import Any

import pytest

from bench.kernels.family import RESULTS
from bench.kernels.page import replaced
from bench.serving.page import PAGE, found, written

MEASURED = found(RESULTS)


def test_the_table_is_that_of_the_result_files() -> None:
    page = PAGE.read_text()
    assert replaced(page, "engines", written(MEASURED)) == page, "run python -m bench.serving.page"


@pytest.mark.parametrize("name", MEASURED)
def test_an_engine_comes_with_its_command_machine_and_commit(name: str) -> None:
    where = MEASURED[name]["environment"]
    assert MEASURED[name]["command"].startswith("python -m bench.serving.compare ")
    assert where["commit"] and not where["commit"].endswith("+") and where["gpu"]


def result(name: str, seconds: list[float], **where: str) -> dict[str, Any]:
    parts = {f"run {n}": {"seconds": value, "prompt_tokens": 1000} for n, value in enumerate(seconds)}
    environment = {"commit": "c", "date": "d", "gpu": "g", **where}
    options = {"kv_retention": 0.25, "fits_tokens": 1}
    return {"engine": name, "command": "x -o y", "environment": environment, "options": options,
            "cases": {"prefill": parts, "answers-8k": parts}}  # fmt: skip


def test_cells_are_medians_with_their_span_and_how_many_times_as_fast_that_is() -> None:
    peer = result("vllm", [4.0], vllm="1")
    table = written({"vllm": peer, "tangram": result("tangram", [1.0, 2.0, 4.0])}).splitlines()
    assert table[0] == "|  | vLLM 1 | ρ 0.25 |"
    assert table[2] == "| prefill, 64 × 8,192 tokens: tokens/s | 250.0 | 500.0 (250.0–1,000) · 2.00 × |"
    assert table[3] == "| 64 × (8,192 in, 512 out): s | 4 | 2 (1–4) · 2.00 × |"
