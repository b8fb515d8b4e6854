"""The demo from its start to its end: what it says is what the engine did."""

from __future__ import annotations

import io
import shlex
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean

import numpy as np
import pytest
import torch
from msgspec import structs
from rich.console import Console
from torch import Tensor
from typer.testing import CliRunner

from bench.demo import __main__ as demo
from bench.demo import paint, show
from bench.demo.talk import FULL, QUESTIONS, SMALL, DemoAnswer, DemoConversation, DemoQuestion
from tangram.cache.keys import ChunkKeys
from tangram.cache.manager import CacheManager
from tangram.cache.retention import Retention
from tangram.cli import app
from tangram.kernels.reference import gather
from tangram.types import Request, SamplingParams, Usage

COLUMNS = 80


@dataclass(frozen=True)
class Shown:
    """A run of the demo whose output goes to a file."""

    code: int
    text: str
    errors: str
    findings: demo.Findings


@pytest.fixture(scope="module")
def shown() -> Iterator[Shown]:
    out, err, seen = io.StringIO(), io.StringIO(), list[demo.Findings]()

    def run(console: Console) -> demo.Findings:
        seen.append(demo_run(console))
        return seen[0]

    demo_run = demo.run
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setenv("COLUMNS", str(COLUMNS))
        patch.setattr(demo, "run", run)
        code = demo.main([])
    yield Shown(code, out.getvalue(), err.getvalue(), seen[0])


def test_it_ends_well_and_reads_the_document_once_for_each_ratio(shown: Shown) -> None:
    stats = shown.findings.talk.engine.stats()
    document = len(shown.findings.talk.prompt(QUESTIONS[0]))
    assert shown.code == 0
    assert "calibrating" not in shown.errors
    assert stats.prompt_tokens - stats.cached_tokens < 2.5 * document
    assert stats.generated_tokens < 30 * 2 * len(QUESTIONS)


def test_a_file_gets_no_colors_and_no_lines_that_are_too_long(shown: Shown) -> None:
    assert "\x1b" not in shown.text
    assert max(map(len, shown.text.splitlines())) <= COLUMNS


def test_every_answer_is_right_without_compression(shown: Shown) -> None:
    assert [pair[0].text for pair in shown.findings.pairs if not pair[0].right] == []
    assert [pair[0].question for pair in shown.findings.pairs] == list(QUESTIONS)


def test_what_compression_breaks_is_shown(shown: Shown) -> None:
    broken = sum(not pair[1].right for pair in shown.findings.pairs)
    assert shown.text.count("WRONG") == broken
    assert f"{len(QUESTIONS) - broken} of {len(QUESTIONS)}" in shown.text


def test_an_answer_without_the_expected_words_is_wrong() -> None:
    answer = make_answer("The head keeper is ingrid solheim.")
    assert answer.right
    assert not replace(answer, text="The head keeper is Ingrid.").right


def test_the_memory_shown_is_what_the_engine_holds(shown: Shown) -> None:
    talk, (whole, small) = shown.findings.talk, shown.findings.pairs[0]
    assert small.usage.kv_bytes < 0.5 * whole.usage.kv_bytes
    for answer in (whole, small):
        again = talk.ask(answer.question, answer.kv_retention)
        assert again.text == answer.text
        assert again.usage.kv_bytes == answer.usage.kv_bytes
        assert f"{answer.usage.kv_bytes / 2**20:.1f} MiB" in shown.text
    assert f"{small.usage.kv_bytes / whole.usage.kv_bytes:.0%}, of which" in shown.text


def test_full_chunks_hold_no_more_than_the_ratio(shown: Shown) -> None:
    talk = shown.findings.talk
    held = {rho: talk.layout(rho).count_held_pages(5, 0) for rho in (FULL, SMALL)}
    assert held[SMALL] <= SMALL * held[FULL]
    assert f"{held[SMALL] / held[FULL]:.0%}, at most ρ" in shown.text


def test_as_many_conversations_fit_as_the_bars_say(shown: Shown) -> None:
    talk, tokens = shown.findings.talk, shown.findings.pairs[0][0].held_tokens
    said = show.conversations(talk, tokens)
    assert said[SMALL] > 2 * said[FULL]
    for rho, count in said.items():
        pages = talk.engine.stats().pages_total
        retention = Retention(rho, talk.layout(rho), "")
        cache = CacheManager(
            [retention], total_pages=pages, max_sequences=500, prefix_caching=False
        )
        admitted = 0
        keys = ChunkKeys(retention, "")
        while cache.admit(keys, np.zeros(tokens, np.int64), tokens) is not None:
            admitted += 1
        assert admitted == count
        assert any(
            line.startswith(f"ρ {rho}") and line.endswith(f" {count}")
            for line in map(str.rstrip, shown.text.splitlines())
        )


def test_the_painted_words_are_those_that_lie_in_the_pool(shown: Shown) -> None:
    talk, words = shown.findings.talk, shown.findings.words
    assert " ".join(word.text for word in words).startswith(demo.PARAGRAPH)
    whole, small = (keys_of_the_first_chunk(talk, rho) for rho in (FULL, SMALL))
    heads_holding = torch.zeros(talk.engine.layout.chunk_tokens)
    for head, keys in small.items():
        # In the first chunk both ratios compute the same keys, and no two of its tokens share one.
        heads_holding += (whole[head][:, None] == keys[None]).all(-1).any(1)
    assert int(heads_holding.sum()) == sum(len(keys) for keys in small.values())
    for word in words:
        shares = (heads_holding[word.begin : word.end] / len(small)).tolist()
        assert word.share == pytest.approx(fmean(shares))


def test_words_that_many_heads_kept_are_marked_without_colors(shown: Shown) -> None:
    marked = [word for word in shown.findings.words if word.share >= paint.MARKED]
    assert 0 < len(marked) < len(shown.findings.words)
    told = shown.text[shown.text.index("What the heads kept") :].replace("[word]", "")
    assert told.count("[") == len(marked)
    assert all(f"[{word.text}]" in told for word in marked)


def test_words_are_painted_by_their_share(shown: Shown) -> None:
    words = shown.findings.words
    text = paint.paint(words, colored=True)
    styles = [(text.plain[span.start : span.end], span.style) for span in text.spans]
    assert [(w.text, paint.style_of(w.share)) for w in words] == styles
    assert paint.style_of(0.0) != paint.style_of(paint.MARKED) == paint.style_of(1.0)


def test_drafts_quote_the_same_words_and_are_shown_with_both_speeds(shown: Shown) -> None:
    plain, drafted = shown.findings.quotations
    assert plain.text == drafted.text and plain.text[:40] in shown.findings.talk.document
    assert plain.drafted is None and drafted.drafted is not None
    assert drafted.drafted.accepted > 20
    told = " ".join(shown.text[shown.text.index("Faster with drafts") :].split())
    assert f"writes {plain.tokens_per_s:.1f} tokens/s, and {drafted.tokens_per_s:.1f}" in told
    assert "the same text" in told and f"accepted {drafted.drafted.accepted} of" in told


def test_other_words_with_drafts_fail_the_demo(shown: Shown) -> None:
    plain, drafted = shown.findings.quotations
    other = replace(shown.findings, quotations=(plain, replace(drafted, text="Another.")))
    assert shown.findings.problems == []
    assert other.problems == [f"with drafts the model wrote 'Another.', not {plain.text!r}"]


def test_the_commands_at_its_end_exist(shown: Shown) -> None:
    for command, _ in show.next_commands():
        assert command in shown.text
        arguments = shlex.split(command.removeprefix(show.program()))
        result = CliRunner().invoke(app, [*arguments, "--help"])
        assert result.exit_code == 0, result.output


def test_a_model_that_cannot_be_had_fails_the_demo(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "run", partial(demo.run, model="/no/such/model"))
    assert demo.main([]) == 1
    assert "the demo failed: " in capsys.readouterr().out


def test_reuse_and_a_smaller_cache_are_required(shown: Shown) -> None:
    whole, small = make_answer("", kv_bytes=100), make_answer("", kv_bytes=50)
    reused = tuple(
        replace(a, usage=structs.replace(a.usage, cached_tokens=2560)) for a in (whole, small)
    )

    def problems(*pairs: tuple[DemoAnswer, ...]) -> list[str]:
        return replace(shown.findings, pairs=list(pairs)).problems

    assert problems((whole, small), reused) == []
    assert "question 2 reused nothing" in problems((whole, small), (whole, small))[0]
    assert "question 1 holds 100" in problems((whole, whole), reused)[0]


def make_answer(text: str, kv_bytes: int = 1) -> DemoAnswer:
    usage = Usage(3000, 10, 0, kv_bytes, 100)
    return DemoAnswer(DemoQuestion("Who?", "Ingrid Solheim"), FULL, text, usage, 1.0, 1.0)


def keys_of_the_first_chunk(
    talk: DemoConversation, kv_retention: float
) -> dict[tuple[int, int], Tensor]:
    """By layer and head, the keys [kept, D] that the pool has of the document's first chunk."""
    keys = dict[tuple[int, int], Tensor]()
    engine, layout = talk.engine, talk.layout(kv_retention)

    def read(_: object) -> None:
        cache, pool = engine._scheduler.cache, engine._runner.pool
        (sequence,) = cache.sequences.values()
        tables = torch.from_numpy(cache.tables[sequence.slot])
        for layer, head in np.ndindex(layout.head_group.shape):
            table = int(layout.group_offset[layout.head_group[layer, head]])
            kept = int(layout.head_kept_tokens[layer, head])
            column = int(layout.head_column[layer, head])
            keys[layer, head] = gather(pool, tables, table, column, 0, kept)[0].clone()

    two = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    request = Request(
        "pool",
        talk.prompt(QUESTIONS[0]),
        two,
        lambda event: read(event) if not keys else None,
        kv_retention=kv_retention,
    )
    engine.submit(request)
    while engine.busy:
        engine.step()
    return keys
