"""Answers: at ρ 1.0 those of stock vLLM, at ρ 0.5 the same however steps are made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm.platforms import current_platform

from engines import CHUNK, EngineOutcome, Request, prompt_of, run, tiny_options

LENGTHS = (5, 63, 64, 65, 200, 333)
CUT = {"max_num_batched_tokens": 97}  # steps that end anywhere in a chunk
DRAFTS = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3}


def requests(lengths: tuple[int, ...] = LENGTHS, new: int = 70) -> list[Request]:
    return [
        {"prompt": prompt_of(length, seed), "max_tokens": new}
        for seed, length in enumerate(lengths)
    ]


def run_alone(tiny: dict[str, Any], options: dict[str, Any]) -> EngineOutcome:
    """Every request by itself, in steps that take whole prompts, without a prefix cache."""
    rounds = [[one] for one in requests()]
    return run({**tiny, "enable_prefix_caching": False}, rounds, options)


@pytest.fixture(scope="module")
def alone(tiny: dict[str, Any], half: dict[str, Any]) -> EngineOutcome:
    return run_alone(tiny, half)


def alone_tokens(alone: EngineOutcome) -> list[list[list[int]]]:
    return [answers[0]["tokens"] for answers in alone.rounds]


def find_lead_where_apart(ours: dict[str, Any], stock: dict[str, Any]) -> float | None:
    """The lead of stock's token over its next one where the answers part; None if they do not."""
    pairs = zip(ours["tokens"][0], stock["tokens"][0], stock["leads"], strict=True)
    return next((lead for mine, theirs, lead in pairs if mine != theirs), None)


def test_all_entries_give_the_answers_of_stock(alone: EngineOutcome, tiny: dict[str, Any]) -> None:
    """On a GPU, attention of float32 rounds its products differently: all but ties are the same."""
    wanted = [{**request, "leads": True} for request in requests()]
    stock = run({**tiny, **CUT}, [wanted, wanted], None)
    ours = run({**tiny, **CUT}, [wanted, wanted], {})
    for number in range(2):
        for found, expected in zip(ours.rounds[number], stock.rounds[number], strict=True):
            apart = find_lead_where_apart(found, expected)
            assert apart is None or (apart <= 0.02 and not current_platform.is_cpu())
    assert ours.cached_tokens(1) == stock.cached_tokens(1)
    assert ours.tokens(0)[4:] != alone_tokens(alone)[4:]  # what dropped entries change


def test_the_log_says_how_many_tokens_fit(alone: EngineOutcome) -> None:
    lines = [line for line in alone.log.splitlines() if "tokens fit into" in line]
    assert len(lines) == 1
    blocks = alone.blocks - 1
    assert f"Tangram: {blocks * CHUNK:,} tokens fit into {blocks:,} blocks of 64 tokens" in lines[0]
    without = int(lines[0].split("chunks, ")[1].split()[0].replace(",", ""))
    assert 1.9 < blocks * CHUNK / without < 2.05


@pytest.mark.parametrize("most", [64, 300])
def test_steps_may_be_cut_anywhere(
    alone: EngineOutcome, tiny: dict[str, Any], half: dict[str, Any], most: int
) -> None:
    together = run({**tiny, "max_num_batched_tokens": most}, [requests()], half)
    assert together.tokens() == alone_tokens(alone)


@pytest.mark.skipif(current_platform.is_cpu(), reason="vLLM schedules nothing ahead on a CPU")
@pytest.mark.parametrize("eager", [True, False])
def test_steps_may_be_scheduled_ahead_and_replayed(
    alone: EngineOutcome, tiny: dict[str, Any], half: dict[str, Any], eager: bool
) -> None:
    ahead = {**tiny, **CUT, "async_scheduling": True, "enforce_eager": eager}
    found = run(ahead, [requests(), requests()], half)
    assert found.tokens(0) == found.tokens(1) == alone_tokens(alone)
    assert found.free == found.blocks - 1


def test_a_compiled_model_answers_alike(
    alone: EngineOutcome, tiny: dict[str, Any], half: dict[str, Any]
) -> None:
    compiled = run({**tiny, **CUT, "enforce_eager": False}, [requests()], half)
    assert compiled.tokens() == alone_tokens(alone)


def test_a_hit_is_a_miss(alone: EngineOutcome, tiny: dict[str, Any], half: dict[str, Any]) -> None:
    again = run({**tiny, **CUT}, [requests(), requests()], half)
    assert again.cached_tokens(1) == [0, 0, 0, 64, 192, 320]
    assert again.tokens(0) == again.tokens(1) == alone_tokens(alone)


def test_a_prefix_of_the_same_step_is_shared(
    alone: EngineOutcome, tiny: dict[str, Any], half: dict[str, Any]
) -> None:
    long = requests()[-1]
    twins = run({**tiny, "max_num_batched_tokens": 2048}, [[long, long]], half)
    assert twins.tokens() == [alone_tokens(alone)[-1]] * 2
    assert twins.cached_tokens(0) == [0, 320]


def test_preemption_changes_no_answer(
    alone: EngineOutcome, tiny: dict[str, Any], half: dict[str, Any]
) -> None:
    small = run(
        {**tiny, **CUT, "max_model_len": 512, "num_gpu_blocks_override": 17}, [requests()], half
    )
    assert small.counters["vllm:num_preemptions"] > 0
    assert small.tokens() == alone_tokens(alone)
    assert small.free == small.blocks - 1


def test_drafts_are_accepted_and_refused_across_chunk_ends(
    alone: EngineOutcome, tiny: dict[str, Any], half: dict[str, Any]
) -> None:
    drafted = run({**tiny, **CUT, "speculative_config": DRAFTS}, [requests()], half)
    assert drafted.tokens() == alone_tokens(alone)
    accepted = drafted.counters["vllm:spec_decode_num_accepted_tokens"]
    assert 0 < accepted < drafted.counters["vllm:spec_decode_num_draft_tokens"]


@pytest.mark.parametrize("scorer", ["snapkv", "expected_attention", "fastkvzip"])
def test_what_a_scorer_reads_outlasts_steps(
    tiny: dict[str, Any], tmp_path: Path, scorer: str
) -> None:
    """Queries and scores of raw tokens, with cuts, hits, drafts and preemption at once."""
    options = tiny_options(tmp_path, scorer)
    alone = run_alone(tiny, options)
    small = {**tiny, **CUT, "max_model_len": 512, "num_gpu_blocks_override": 24}
    engine = {**small, "speculative_config": DRAFTS, "enforce_eager": scorer == "fastkvzip"}
    together = run(engine, [requests(), requests()], options)
    assert together.tokens(0) == together.tokens(1) == alone_tokens(alone)
    assert together.counters["vllm:num_preemptions"] > 0
    assert together.counters["vllm:prefix_cache_hits"] > 0
    accepted = together.counters["vllm:spec_decode_num_accepted_tokens"]
    assert 0 < accepted < together.counters["vllm:spec_decode_num_draft_tokens"]
    assert together.free == together.blocks - 1


def test_generated_text_is_published_only_if_asked_for(
    tiny: dict[str, Any], half: dict[str, Any]
) -> None:
    first = {"prompt": prompt_of(70, 1), "max_tokens": 130}
    answer = run(tiny, [[first]], half).tokens()[0][0]
    second = {"prompt": first["prompt"] + answer, "max_tokens": 8}
    rounds = [[first], [second], [second]]
    plain = run(tiny, rounds, half)
    assert [plain.cached_tokens(at) for at in range(3)] == [[0], [CHUNK], [3 * CHUNK]]
    published = run(tiny, rounds, {**half, "publish_decoded": True})
    assert [published.cached_tokens(at) for at in range(3)] == [[0], [3 * CHUNK], [3 * CHUNK]]
    assert published.tokens(2) == plain.tokens(2)


def test_samples_aborts_and_grammars(
    alone: EngineOutcome, tiny: dict[str, Any], half: dict[str, Any]
) -> None:
    long = requests()[-1]
    samples, aborted, guided = (
        {**long, "n": 3},
        {**long, "abort_after": 9},
        {**long, "regex": "[ab]{70}"},
    )
    found = run({**tiny, **CUT}, [[samples, aborted, guided, long], [long]], half)
    three, few, matched, whole = found.rounds[0]
    assert len(three["tokens"]) == 3 and len({tuple(each) for each in three["tokens"]}) == 3
    assert len(few["tokens"][0]) < 70
    assert set(matched["texts"][0]) <= set("ab") and len(matched["texts"][0]) >= 60
    assert whole["tokens"] == found.tokens(1)[0] == alone_tokens(alone)[-1]
    assert found.free == found.blocks - 1
