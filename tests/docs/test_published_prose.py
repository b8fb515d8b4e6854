"""Figures in the sentences of CHANGELOG and README are those of raw files."""

from __future__ import annotations

import re
from functools import cache
from statistics import median
from typing import Any

import pytest

from bench.published import ROOT, RawFile
from bench.render.page import RESULTS, read_blocks
from bench.serving.series import figures
from bench.speculation.figures import paired_times_as_fast
from tools import torch_build

PREFILL = {"case": "prefill", "parts": ["run"], "figure": "prompt_tokens_per_s"}
ALONE = {"case": "alone-8k", "parts": ["run"], "figure": "tpot_ms p50"}
STREAMS_256 = {"case": "streams-256", "parts": ["run"], "figure": "requests_per_s"}
TURN_3 = {"case": "sessions-40", "parts": ["turn 3"], "figure": "requests_per_s"}
# What a measured figure looks like in a sentence: a number with its unit or of what it is a share.
FIGURE = re.compile(
    r"(?<![\w.])[\d.,]*\d (?:(?:ms|s|%|×|tokens/s|[KMG]B|GB/s)(?!\w)|times as|of (?:the|its) \w)"
    r"|\b(?:half|a third|a quarter|a fifth|twice) (?:of |as |the )?(?:many|fast|time|speed)"
)


@cache
def raw(name: str) -> Any:
    return RawFile(RESULTS / f"{name}.json").content


def at(name: str, row: dict[str, Any]) -> float:
    """The median figure of a run of `bench.serving.compare`."""
    return median(figures(raw(name), row))


def over(name: str, other: str, row: dict[str, Any]) -> float:
    return at(name, row) / at(other, row)


def decode_over_fp8(case: str) -> float:
    row = {"case": case, "parts": ["run"], "figure": "tpot_ms p50"}
    return over("serving-7_tangram-0.25", "serving-7_tangram-0.25-fp8", row)


def drafts_of_64() -> float:
    engines = raw("speculation-real-64x7k")["engines"]
    return median(paired_times_as_fast(engines["compressed_kv"]["runs"], engines["plain"]["runs"]))


def changelog_sentences() -> list[str]:
    """The sentences of the changelog that have figures, with those of the raw files."""
    one, two = "ranks-1_tangram-1", "ranks-2_tangram-1"
    fits = raw(two)["options"]["fits_tokens"] / raw(one)["options"]["fits_tokens"]
    ours, peer, gpt = "serving-8_tangram-1", "serving-8_vllm", "gpt-oss-20b-2"
    fp8 = sorted(decode_over_fp8(case) for case in ("decode-64x16k", "decode-4x128k"))
    http, inside = "over-http/served_tangram-0.25", "over-http/serving-9_tangram-0.25"
    return [
        f"a server makes {256e-3 * at(http, STREAMS_256):.1f} K tokens/s, "
        f"{over(http, inside, STREAMS_256):.2f} of what the engine makes alone.",
        f"Two H100 hold {'twice' if 1.95 < fits < 2.05 else fits} as many tokens as one and "
        f"prefill {over(two, one, PREFILL):.2f} times as fast, with steps twice as large.",
        f"Decode from an FP8 cache on a GPU is {fp8[0]:.2f} to {fp8[1]:.2f} times as fast",
        f"prefill has {over(ours, peer, PREFILL):.2f} of its speed, the third turn of 40 sessions "
        f"{over(ours, peer, TURN_3):.2f}, one row of GPT-OSS-20B "
        f"{over(gpt + '_vllm', gpt + '_tangram-1', ALONE):.2f}",
        f"they have {drafts_of_64():.2f} × the speed without drafts",
    ]


def readme_sentences() -> list[str]:
    """The sizes that the README names outside of its rendered tables."""
    fetched = (RESULTS.parents[1] / "docs" / "install.md").read_text(encoding="utf-8")
    (model,) = re.findall(r"the embedded model, (\d+) MB", fetched)
    return [
        f"the embedded model, {model} MB",
        f"CUDA {torch_build._CUDA_GB[1]} GB, CPU {torch_build._CPU_GB[1]} GB",
    ]


@pytest.mark.parametrize(
    ("page", "sentences"),
    [("CHANGELOG.md", changelog_sentences), ("README.md", readme_sentences)],
    ids=["CHANGELOG", "README"],
)
def test_every_figure_of_a_sentence_is_that_of_a_raw_file(page: str, sentences: Any) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for block in read_blocks(text).values():
        text = text.replace(block, "")
    text = " ".join(text.split())
    for sentence in sentences():
        assert sentence in text
        text = text.replace(sentence, "")
    assert FIGURE.findall(text) == [], "name its raw file here, or let a template render it"


@pytest.mark.parametrize(
    "figure",
    [
        *("gain 4 % where", "in 19 ms", "some 5 s.", "60,668 tokens/s"),
        *("1.66 times as fast", "0.83 of the time", "takes half the time", "twice as many"),
    ],
)
def test_figures_are_seen(figure: str) -> None:
    assert FIGURE.search(figure)


@pytest.mark.parametrize("words", ["ρ 0.5", "Python 3.13", "131,072 tokens", "8 KV heads of 128"])
def test_settings_are_no_figures(words: str) -> None:
    assert not FIGURE.search(words)
