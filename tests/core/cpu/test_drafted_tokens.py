"""What is seen of speculation: usage, counts, the log of the start; and no page is added."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from transformers import LlamaConfig, MistralConfig, PretrainedConfig

from tangram.cache.layout import Layout
from tangram.cache.sequence_cache import SequenceCache
from tangram.cli.answering import answer_prompt
from tangram.config import EngineConfig
from tangram.engine.drafts.speculation import Drafting
from tangram.engine.loop import Engine
from tangram.engine.setup.build import engine_of
from tangram.engine.setup.draft_model import limit_drafts
from tangram.errors import ConfigError
from tangram.model.load import LoadedModel
from tangram.types import Event, Int32, Request, SamplingParams
from tests.mentions import mentioning, mentions
from tests.small_engines import GREEDY, drain, profile_file, run, small_engine

Adopt = Callable[[PretrainedConfig], LoadedModel]
SHAPE: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CHUNK, PAGE = 32, 8
FOX = "the quick brown fox jumps over the lazy dog. "
PROMPT = FOX * 4 + FOX[:19]


@pytest.fixture(scope="module")
def tiny(adopt_tiny: Adopt) -> LoadedModel:
    return adopt_tiny(LlamaConfig(**SHAPE))


@pytest.fixture(scope="module")
def repeating(loaded: LoadedModel) -> Engine:
    """The embedded model, which drafts what came before."""
    return eager(
        engine_of(
            EngineConfig(
                kv_retention=1.0,
                kv_cache_gib=0.1,
                max_num_seqs=2,
                max_model_len=600,
                speculative_config={"method": "ngram", "num_speculative_tokens": 4},
            ),
            loaded,
        )
    )


def eager(engine: Engine) -> Engine:
    """The same engine, which drafts as many tokens as it can whatever they cost."""
    speculation = engine._speculation
    assert speculation is not None
    most = speculation.most

    def choose(load: object, acceptances: Sequence[object], *more: Any) -> list[int]:
        return [most] * len(acceptances)

    speculation._pace.choose = choose  # type: ignore[method-assign]
    return engine


def complete(engine: Engine, text: str, **sampling: Any) -> list[Event]:
    events, params = list[Event](), replace(GREEDY, **({"max_tokens": 40} | sampling))
    engine.submit(Request("fox", engine.codec.encode(text), params, events.append))
    drain(engine)
    return events


def test_usage_adds_up_to_what_the_engine_has_counted(repeating: Engine) -> None:
    before = repeating.stats().speculation
    events = complete(repeating, PROMPT)
    after, last = repeating.stats().speculation, events[-1].usage
    assert before is not None and after is not None and last.drafted is not None
    assert last.drafted.accepted == after.accepted - before.accepted > 0
    assert last.drafted.rejected == after.drafted - before.drafted - last.drafted.accepted
    assert after.drafts > before.drafts and sum(after.accepted_at) == after.accepted
    assert last.drafted.accepted < last.completion_tokens == 40
    tokens = 0
    for event in events:
        tokens += len(event.token_ids)
        assert event.usage.drafted is not None and event.usage.completion_tokens == tokens
        assert event.usage.drafted.accepted < event.usage.completion_tokens


def test_what_a_step_accepts_comes_in_one_event(repeating: Engine) -> None:
    """Until its last step, which may end within what is accepted."""
    events = complete(repeating, PROMPT, logprobs=0)
    most = max(len(event.token_ids) for event in events)
    assert 1 < most <= 5 and len(events[0].token_ids) == 1
    assert all(len(event.token_ids) == len(event.logprobs) for event in events)
    stopped = complete(repeating, PROMPT, stop=["\ufffe"])  # text decides whether it ends
    assert all(len(event.token_ids) == 1 for event in stopped)


def test_the_terminal_says_how_many_drafted_tokens_were_accepted(repeating: Engine) -> None:
    params = replace(GREEDY, max_tokens=20)
    prompt = repeating.codec.encode(PROMPT)
    answer = answer_prompt(repeating, prompt, params, lambda text: None)
    assert answer.usage is not None and answer.usage.drafted is not None
    accepted, rejected = answer.usage.drafted.accepted, answer.usage.drafted.rejected
    assert f"({accepted} of {accepted + rejected} drafted tokens accepted)" in answer.speed


def test_drafts_behind_the_end_of_an_answer_are_rejected(repeating: Engine) -> None:
    """The answer ends at its second token, which is the first of a draft."""
    first, second = (event.token_ids[0] for event in complete(repeating, PROMPT)[:2])
    before = repeating.stats().speculation
    events = complete(repeating, PROMPT, stop_token_ids=[second])
    after, drafted = repeating.stats().speculation, events[-1].usage.drafted
    assert before is not None and after is not None and drafted is not None
    assert first != second and len(events) == 2
    assert after.accepted - before.accepted > 1, "the answer ends within a draft"
    assert drafted.accepted <= 1
    assert drafted.accepted + drafted.rejected == after.drafted - before.drafted


def test_without_speculation_nothing_is_said(tiny: LoadedModel) -> None:
    engine, events = small_engine(tiny), list[Event]()
    params = SamplingParams(temperature=0.0, max_tokens=3)
    engine.submit(Request("plain", (3, 4, 5), params, events.append))
    drain(engine)
    assert events[-1].usage.drafted is None and engine.stats().speculation is None


def test_a_model_of_windows_only_has_nothing_to_draft_from(adopt_tiny: Adopt) -> None:
    windows = adopt_tiny(MistralConfig(**SHAPE, sliding_window=40))
    with pytest.raises(
        ConfigError, match=mentioning("speculative_config.method compressed_kv ngram suffix")
    ):
        small_engine(windows, speculative_config={"method": "compressed_kv"})
    assert run(small_engine(windows, speculative_config={"method": "ngram"}), [[3, 4, 5]])


@pytest.mark.parametrize("method", ["suffix", "compressed_kv"])
def test_the_start_says_what_drafts(
    tiny: LoadedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    options: dict[str, Any] = {"profile": (profile_file(tiny, tmp_path, retention=0.5),)}
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    if method == "compressed_kv":
        config["kv_retention"] = 0.5
    with caplog.at_level(logging.INFO, logger="tangram"):
        small_engine(tiny, speculative_config=config, **(options if len(config) > 2 else {}))
    said = caplog.messages
    assert any(mentions(line, f"speculation: {method} 3") for line in said)
    assert any(mentions(line, "kv_retention 1.0") for line in said)
    costs = any(mentions(line, "drafts 0.5 keydiff scope model") for line in said)
    assert costs == (method == "compressed_kv")


class CheckedPages:
    """Checks the pages of an engine while it drafts and between its steps."""

    def __init__(self, engine: Engine) -> None:
        assert engine._speculation is not None and engine._speculation.drafter is not None
        self.cache, self.drafts = engine._scheduler.cache, 0
        self._draft = engine._speculation.drafter.draft
        engine._speculation.drafter.draft = self.draft  # type: ignore[method-assign]

    def draft(self, drafting: Sequence[Drafting]) -> Tensor:
        self.check()
        drafted = self._draft(drafting)
        self.check()
        self.drafts += len(drafted)
        return drafted

    def check(self) -> None:
        """Sequences hold a page for each `PAGE` tokens of a group, and nothing else is taken."""
        held = [page for seq in self.cache.sequences.values() for page in self._pages(seq)]
        assert len(set(held)) == len(held)
        assert self.cache.ledger.total - self.cache.ledger.free == len(held)

    def _pages(self, seq: SequenceCache) -> list[int]:
        raw, draft = -(-seq.raw_tokens // PAGE), seq.keys.retention.draft
        assert draft is not None and self.cache.drafts is not None
        sealed = [CHUNK // PAGE * seq.sealed_chunks] * len(seq.layout.groups)
        read = (draft.layout.sealed_pages * seq.sealed_chunks).tolist()
        own = _find_entered(self.cache.tables[seq.slot], seq.layout, sealed, raw)
        drafted = _find_entered(self.cache.drafts.tables[seq.slot], draft.layout, read, raw)
        assert len(own) == seq.held_pages and set(drafted) <= set(own)
        assert seq.sealed_chunks == 0 or len(drafted) < len(own)
        return own


def _find_entered(table: Int32, layout: Layout, sealed: Sequence[int], raw: int) -> list[int]:
    """The pages of a row of block tables: of each group those of sealed chunks, and `raw` more."""
    return [
        int(table[layout.group_offset[group] + place])
        for group in range(len(layout.groups))
        for place in range(sealed[group] + raw)
    ]


def test_drafts_hold_no_page_of_their_own(tiny: LoadedModel, tmp_path: Path) -> None:
    """compressed_kv holds the pages of ρ 1.0, each once, while it drafts and between steps."""
    file = profile_file(tiny, tmp_path, retention=0.25)
    engine = eager(
        small_engine(
            tiny,
            profile=(file,),
            enable_prefix_caching=False,
            speculative_config={"method": "compressed_kv", "kv_retention": 0.25},
        )
    )
    watched, events = CheckedPages(engine), list[Event]()
    for number, length in enumerate((75, 40, 20)):  # chunks fill up while others are drafted for
        prompt = tuple(3 + (at * at + number) % 290 for at in range(length))
        engine.submit(Request(f"{number}", prompt, replace(GREEDY, max_tokens=60), events.append))
    while engine.busy:
        engine.step()
        watched.check()
    assert watched.drafts > 30 and engine.stats().sealed_chunks > 3
    (last,) = [event.usage for event in events if event.request_id == "0" and event.finish_reason]
    layout = engine.layout
    assert last.kv_bytes == layout.count_held_pages(*divmod(134, CHUNK)) * layout.page_bytes(4)
    assert layout.keeps_everything and last.drafted is not None and last.drafted.accepted > 0


@pytest.mark.parametrize(
    ("given", "group", "most"),
    [
        ({"method": "suffix"}, 8, 15),
        ({"method": "suffix"}, 7, 16),
        ({"method": "compressed_kv", "num_speculative_tokens": 64, "kv_retention": 0.4}, 4, 31),
        ({"method": "draft_model", "model": "other", "num_speculative_tokens": 12}, 16, 7),
    ],
)
def test_a_gpu_drafts_no_more_than_a_task_verifies(
    given: dict[str, Any], group: int, most: int, caplog: pytest.LogCaptureFixture
) -> None:
    config = EngineConfig(speculative_config=given)
    drafts, lowered = config.speculation, limit_drafts(config, group).speculation
    assert drafts is not None and lowered is not None
    assert lowered == replace(drafts, num_speculative_tokens=most)
    assert (f"lowered from {drafts.num_speculative_tokens} to {most}" in caplog.text) == (
        lowered != drafts
    )


def test_a_gpu_that_could_verify_no_draft_says_so() -> None:
    """All 128 query heads of DeepSeek-V3 are those of one KV head."""
    config = EngineConfig(speculative_config={"method": "suffix"})
    with pytest.raises(ConfigError, match=mentioning("128 speculative_config")):
        limit_drafts(config, 128)
