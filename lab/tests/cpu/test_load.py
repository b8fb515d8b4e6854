"""Engines under load: what is asked, what comes of it, and the commands that measure it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tangram.cli import app
from tangram.engine.llm import LLM
from tangram.engine.sampling.sampler import SampledTokens
from tangram.errors import ConfigError, ModelError, RequestError
from tangram.types import ChosenToken, Event, FinishReason, Request, SamplingParams
from tangram_lab.load.asks import Ask, alike, arriving, draw_tokens, next_turn, read_trace
from tangram_lab.load.clock import (
    GivenUpError,
    LatencyLimits,
    Patience,
    Summary,
    TimedAnswer,
    answer_all,
)
from tests.small_engines import check_books


def test_a_config_alone_makes_a_model_whose_words_are_numbers(folder: Path, small_llm: LLM) -> None:
    output = small_llm.generate(
        "17 4 299", SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    )[0]
    assert output.prompt_token_ids == (17, 4, 299)
    assert output.outputs[0].text.split() == [str(token) for token in output.outputs[0].token_ids]
    again = LLM(str(folder), load_format="dummy", kv_retention=1.0)
    states = [engine._loaded.model.state_dict() for engine in (small_llm.engine, again.engine)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_an_unknown_load_format_is_refused() -> None:
    with pytest.raises(ConfigError, match="load_format is 'mock'"):
        LLM(load_format="mock")  # type: ignore[arg-type]


@pytest.mark.parametrize("share", [0.0, 1.5])
def test_a_share_of_memory_outside_its_range_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match=f"gpu_memory_utilization is {share}"):
        LLM(gpu_memory_utilization=share)


def test_answers_are_those_of_the_engine_by_the_clock(small_llm: LLM) -> None:
    asks = alike(3, 20, 5, shared_tokens=40, vocab_size=300)
    told: list[int] = []
    answers = answer_all(small_llm.engine, asks, told.append)
    expected = small_llm.generate(
        [{"prompt_token_ids": list(ask.tokens)} for ask in asks],
        SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True),
    )
    assert [tuple(answer.token_ids) for answer in answers] == [
        output.outputs[0].token_ids for output in expected
    ]
    assert sorted(told) == [1, 2, 3]
    for answer in answers:
        assert 0 < answer.first_token_s < answer.times_s[-1] and len(answer.times_s) == 5
        assert answer.times_s == sorted(answer.times_s)


def test_a_turn_finds_the_one_before_in_the_cache(small_llm: LLM) -> None:
    small_llm.engine.clear_cache()
    histories = [draw_tokens(60, 300, session) for session in range(2)]
    for turn in (1, 2):
        asks = next_turn(histories, turn, 10, 4, 300)
        answers = answer_all(small_llm.engine, asks)
        histories = [
            ask.tokens + tuple(answer.token_ids) for ask, answer in zip(asks, answers, strict=True)
        ]
        assert [answer.cached_tokens >= 60 for answer in answers] == [turn == 2] * 2


def test_what_requests_share_is_computed_once_even_when_they_come_together(small_llm: LLM) -> None:
    small_llm.engine.clear_cache()
    before = small_llm.engine.stats().sealed_chunks
    asks = alike(4, 10, 3, shared_tokens=64, vocab_size=300)
    answers = answer_all(small_llm.engine, asks)
    assert small_llm.engine.stats().sealed_chunks - before == 2
    assert sorted(answer.cached_tokens for answer in answers) == [0, 64, 64, 64]
    small_llm.engine.clear_cache()
    assert [answer_all(small_llm.engine, [ask])[0].token_ids for ask in asks] == [
        answer.token_ids for answer in answers
    ]


def test_requests_wait_for_their_time(small_llm: LLM) -> None:
    answers = answer_all(small_llm.engine, [Ask((5, 6, 7), 2, 1.0), Ask((5, 6, 8), 2)])
    assert answers[1].times_s[-1] < 1.0 < answers[0].times_s[0]
    assert answers[0].first_token_s == answers[0].times_s[0] - 1.0


def test_a_request_that_never_fits_stops_all(small_llm: LLM) -> None:
    with pytest.raises(RequestError, match="prompt has 5000 tokens"):
        answer_all(small_llm.engine, [Ask((1, 2), 2), Ask((3,) * 5000, 2)])
    assert not small_llm.engine.busy


def test_a_summary_adds_up() -> None:
    answers = [
        TimedAnswer(0.0, 10, [1.0, 1.5, 2.0], [7, 8, 9], 4),
        TimedAnswer(1.0, 30, [4.0], [7], 0),
    ]
    summary = Summary.of(answers)
    assert (summary.requests, summary.seconds, summary.prompt_tokens, summary.output_tokens) == (
        2,
        4.0,
        40,
        4,
    )
    assert (
        summary.requests_per_s == 0.5
        and summary.tokens_per_s == 11.0
        and summary.cached_share == 0.1
    )
    assert summary.ttft_s["p50"] == 2.0 and summary.tpot_ms["p99"] == 500.0


@pytest.mark.parametrize(
    ("limits", "met"),
    [
        (LatencyLimits(), 3),
        (LatencyLimits(ttft_s=1.0), 2),
        (LatencyLimits(tpot_ms=500.0), 2),
        (LatencyLimits(ttft_s=3.0, tpot_ms=499.0), 1),
        (LatencyLimits(ttft_s=0.5), 0),
    ],
)
def test_goodput_counts_what_came_in_time(limits: LatencyLimits, met: int) -> None:
    """An answer of one token has no time per token to miss."""
    answers = [
        TimedAnswer(0.0, 10, [1.0, 1.5, 2.0], [7, 8, 9]),
        TimedAnswer(1.0, 30, [4.0], [7]),
        TimedAnswer(2.0, 5, [3.0, 5.0], [7, 8]),
    ]
    summary = Summary.of(answers, limits)
    assert summary.goodput_per_s == met / 5.0 and summary.limits == limits


def test_a_limit_that_nothing_can_meet_is_refused() -> None:
    with pytest.raises(ConfigError, match="limit of tpot_ms is 0"):
        LatencyLimits(tpot_ms=0.0)


def test_arrivals_have_the_rate_that_is_asked_for_and_the_same_order() -> None:
    asks = alike(400, 3, 2, shared_tokens=0, vocab_size=300)
    slow, fast = arriving(asks, 2.0), arriving(asks, 8.0)
    assert 180 < slow[-1].at_s < 220
    assert [ask.tokens for ask in slow] == [ask.tokens for ask in asks]
    assert [ask.at_s for ask in slow] == sorted(ask.at_s for ask in slow)
    assert [ask.at_s for ask in fast] == pytest.approx([ask.at_s / 4 for ask in slow])


def test_who_listens_hears_when_all_have_their_first_token(small_llm: LLM) -> None:
    heard: list[int] = []
    generated = small_llm.engine.stats().generated_tokens
    answer_all(
        small_llm.engine,
        alike(3, 20, 6, shared_tokens=0, vocab_size=300),
        started=lambda: heard.append(small_llm.engine.stats().generated_tokens - generated),
    )
    assert len(heard) == 1 and 3 <= heard[0] < 18


def test_a_trace_gives_equal_tokens_for_equal_blocks(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 0, "input_length": 700, "output_length": 3, "hash_ids": [4, 9]},
        {"timestamp": 2000, "input_length": 600, "output_length": 0, "hash_ids": [4, 5]},
        {"timestamp": 9000, "input_length": 5, "output_length": 1, "hash_ids": [1]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    first, second = read_trace(path, seconds=5, speed=2.0, vocab_size=300)
    assert (len(first.tokens), first.output_tokens, first.at_s) == (700, 3, 0.0)
    assert (len(second.tokens), second.output_tokens, second.at_s) == (600, 1, 1.0)
    assert (
        first.tokens[:512] == second.tokens[:512]
        and first.tokens[512:600] != second.tokens[512:600]
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"timestamp": 0}', "1: input_length, output_length, hash_ids missing"),
        ("nothing", "1: not JSON"),
        ("", r"trace\.jsonl.*\b5 s"),
        (
            '{"timestamp": 0, "input_length": 900, "output_length": 1, "hash_ids": [1]}',
            "1: hash_ids.* 512 .*input_length is 900",
        ),
    ],
)
def test_a_trace_that_is_none_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_trace(path, seconds=5, speed=1.0, vocab_size=300)


SMALL = [
    "--load-format",
    "dummy",
    "--kv-retention",
    "1.0",
    "--chunk-tokens",
    "32",
    "--kv-cache-gib",
    "0.01",
    "--max-num-seqs",
    "4",
    "--max-num-batched-tokens",
    "128",
    "--page-tokens",
    "8",
]


@pytest.mark.parametrize(
    ("command", "options", "parts"),
    [
        (
            "throughput",
            ["--requests", "3", "--input-tokens", "40", "--output-tokens", "4", "--repeats", "2"],
            ["run 1", "run 2"],
        ),
        (
            "multi-turn",
            [
                "--sessions",
                "2",
                "--history-tokens",
                "50",
                "--turns",
                "2",
                "--user-tokens",
                "5",
                "--output-tokens",
                "4",
            ],
            ["turn 1", "turn 2"],
        ),
        ("trace", ["--speed", "1,4"], ["speed 1", "speed 4"]),
        ("trace", ["--speed", "1,4", "--hold-ttft-s", "1e-9"], []),
    ],
)
def test_the_commands_keep_what_they_measure(
    command: str, options: list[str], parts: list[str], folder: Path, tmp_path: Path
) -> None:
    if command == "trace":
        file = tmp_path / "trace.jsonl"
        file.write_text(
            '{"timestamp": 0, "input_length": 100, "output_length": 3, "hash_ids": [1]}\n'
        )
        options = [*options, "--file", str(file)]
    kept = tmp_path / "kept.json"
    result = CliRunner().invoke(
        app,
        ["bench", "serving", command, str(folder), *SMALL, *options, "-o", str(kept)],
        catch_exceptions=False,
    )
    assert result.exit_code == 0, result.output
    content = json.loads(kept.read_text())
    assert list(content["parts"]) == parts
    assert content["environment"]["cpu"] and content["config"]["load_format"] == "dummy"
    assert ("given_up" in content) == (not parts)
    for part in content["parts"].values():
        assert part["requests_per_s"] > 0 and part["ttft_s"]["p50"] > 0
    if command == "multi-turn":
        assert content["parts"]["turn 2"]["cached_share"] >= 0.5


def test_a_measurement_says_what_was_drafted(folder: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    load = ["--requests", "2", "--input-tokens", "40", "--output-tokens", "24"]
    method = ["--speculative-config", '{"method": "ngram"}']
    command = ["bench", "serving", "throughput", str(folder), *SMALL, *load, *method]
    result = CliRunner().invoke(app, [*command, "-o", str(kept)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    content = json.loads(kept.read_text())
    drafted = content["stats"]["speculation"]
    assert drafted["drafted"] >= drafted["accepted"] == sum(drafted["accepted_at"])
    assert f"{drafted['accepted']} of {drafted['drafted']} " in " ".join(result.output.split())
    assert json.loads(content["config"]["speculative_config"]) == {"method": "ngram"}


def test_a_run_that_is_too_slow_is_given_up_and_leaves_nothing_behind(small_llm: LLM) -> None:
    engine, asks = small_llm.engine, alike(6, 30, 20, shared_tokens=0, vocab_size=300)
    with pytest.raises(GivenUpError, match=r"10%.* 1e-09 s"):
        answer_all(engine, asks, patience=Patience(1e-9, every_s=0.0))
    assert not engine.busy and engine.stats().pages_held == 0
    assert len(answer_all(engine, asks, patience=Patience(600.0))) == 6
    late = [TimedAnswer(0.0, 5, times_s=[first]) for first in (1.0, 2.0, 9.0)] + [
        TimedAnswer(8.0, 5)
    ]
    assert Patience(5.0, share=0.2).ends(late, 10.0) and not Patience(5.0, share=0.3).ends(
        late, 10.0
    )
    assert Patience(5.0, share=0.3).ends(late, 14.0), "who asked at 8 waits since"


@pytest.mark.parametrize("ahead", [False, True])
def test_a_stop_string_ends_a_completion_whose_next_token_is_under_way(
    ahead: bool, small_llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the text is read while the device goes on, neither the client nor the books see the
    token too many.
    """
    monkeypatch.setattr(small_llm.engine, "ahead", ahead)
    prompt = {"prompt_token_ids": list(range(40, 71))}  # the answer's second token ends a chunk
    free = small_llm.generate(
        prompt, SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    )[0].outputs[0]
    words = free.text.split()
    stop = words[2]
    last = words.index(stop)
    held = small_llm.generate(
        prompt, SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, stop=(stop,))
    )[0]
    assert held.outputs[0].finish_reason == "stop"
    assert held.outputs[0].text.split() == words[:last]
    assert held.outputs[0].token_ids == free.token_ids[: last + 1]
    check_books(small_llm.engine)
    assert small_llm.engine.stats().pages_held == 0


@pytest.mark.parametrize("ahead", [False, True])
def test_after_a_step_that_failed_the_engine_answers_as_before(
    ahead: bool, small_llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, asks = small_llm.engine, alike(3, 40, 6, shared_tokens=20, vocab_size=300)
    engine.clear_cache()
    expected = [answer.token_ids for answer in answer_all(engine, asks)]
    monkeypatch.setattr(engine, "ahead", ahead)
    read, reads = SampledTokens.tokens_on_host, list[int]()

    def broken(choice: SampledTokens) -> list[ChosenToken | None]:
        reads.append(1)
        if len(reads) == 3:
            raise ModelError("the logits are NaN")
        return read(choice)

    monkeypatch.setattr(SampledTokens, "tokens_on_host", broken)
    events = list[Event]()
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    engine.submit(Request("lost", asks[0].tokens, params, events.append))
    with pytest.raises(ModelError):
        while engine.busy:
            engine.step()
    assert events[-1].finish_reason is FinishReason.ABORT and "step" in str(events[-1].error)
    assert not engine.busy and engine.stats().pages_free == engine.stats().pages_total
    check_books(engine)
    assert [answer.token_ids for answer in answer_all(engine, asks)] == expected


def test_launching_ahead_changes_nothing(small_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for answers of one token; of what is aborted with a token on its way, that token is
    dropped.
    """
    engine, asks = (
        small_llm.engine,
        [*alike(3, 30, 6, shared_tokens=0, vocab_size=300), Ask((9, 9, 9), 1)],
    )
    expected = [answer.token_ids for answer in answer_all(engine, asks)]
    monkeypatch.setattr(engine, "ahead", True)
    assert [answer.token_ids for answer in answer_all(engine, asks)] == expected
    events = list[Event]()
    params = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
    engine.submit(Request("gone", (3, 4, 5), params, events.append))
    while sum(len(event.token_ids) for event in events) < 3:
        engine.step()
    engine.abort("gone")
    while engine.busy:
        engine.step()
    assert [event.finish_reason for event in events].count(FinishReason.ABORT) == 1
    assert events[-1].finish_reason is FinishReason.ABORT
    assert events[-1].usage.completion_tokens == sum(len(event.token_ids) for event in events) == 3
    check_books(engine)
