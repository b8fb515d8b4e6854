"""docs/from-vllm.md says of vLLM's options and metrics what the commands and /metrics say."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tangram.cli.foreign import explain
from tests.edge.host.test_command_line import ALL, names
from tools.vllm_page import COMPOSED, PAGE, SAME, render

RECORDED = Path(__file__).parents[1] / "fixtures" / "vllm_options" / "serve.json"
TEXT = PAGE.read_text()
METRICS = re.findall(r"^\| `(vllm:\w+)` \| (\w+) \| (.*?) \|", TEXT, re.MULTILINE)


def test_the_page_is_what_the_code_says() -> None:
    assert render() == TEXT, "run python -m tools.vllm_page"


def test_every_option_of_vllm_is_the_same_or_explained() -> None:
    """`tests/fixtures/vllm_options/make_fixture.py` has read vLLM's own sources."""
    recorded = json.loads(RECORDED.read_text())
    names = {name for group in recorded["options"].values() for name in group}
    assert len(names) > 250 and "--max-model-len" in names
    assert {name for name in names if explain(name, []) is None} <= set(SAME)
    assert set(SAME) - {"--no-enable-prefix-caching"} <= names


def test_options_of_one_name_are_ours_and_need_no_translation() -> None:
    assert set(SAME) <= names(ALL["serve",]) | {"--enable-prefix-caching"}
    assert not [name for name in SAME if explain(name, [])]


def test_a_metric_stands_beside_its_own_counterpart() -> None:
    ours = {theirs: own for theirs, _, own in METRICS}
    assert ours["vllm:num_requests_running"] == "`tangram_requests_running`"
    assert ours["vllm:e2e_request_latency_seconds"] == "`tangram_completion_duration_seconds`"
    assert len(METRICS) > 20 and set(COMPOSED) <= set(ours)
