"""A second model drafts: answers stay the same, its pool is its own, and its books are right."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Hashable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from typer.testing import CliRunner

from tangram.cli import app
from tangram.config import EngineConfig
from tangram.engine.drafts.model_drafts import ModelDrafter
from tangram.engine.drafts.speculation import Speculation
from tangram.engine.loop import Engine
from tangram.engine.passes.forward_pass import PlannedStep
from tangram.engine.setup.build import engine_of
from tangram.engine.setup.draft_model import PoolShape, draft_bytes, draft_pages
from tangram.errors import ConfigError
from tangram.model.load import LoadedModel
from tangram.speculate.pace import Acceptance, Pace
from tangram.speculative_config import DraftModel
from tangram.types import Event, Request, SamplingParams
from tests.core.host.device_double import geometry, layout
from tests.mentions import mentioning, mentions
from tests.small_engines import GREEDY, check_books, drain, profile_file, run, small_engine
from tests.speculation import few

BASE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SMALLER = BASE | {"num_hidden_layers": 1, "hidden_size": 24, "num_key_value_heads": 2}
PROMPTS = [[5, 9, 17, 3], list(range(3, 93)), [(7 * i) % 90 + 3 for i in range(150)], [8] * 31]
MOST = 4
SAMPLINGS = {
    "greedy": GREEDY,
    "seeded": SamplingParams(
        temperature=0.9,
        top_p=0.95,
        seed=7,
        max_tokens=40,
        ignore_eos=True,
        presence_penalty=0.5,
        frequency_penalty=0.3,
        repetition_penalty=1.1,
    ),
    "two": SamplingParams(temperature=0.8, seed=3, n=2, max_tokens=40, ignore_eos=True),
}
Adopt = Callable[[PretrainedConfig], LoadedModel]


class _Always(Pace):
    """Drafts as much as it may, however long that takes."""

    def choose(self, load: Hashable, acceptances: Sequence[Acceptance], *more: Any) -> list[int]:
        return [MOST] * len(acceptances)


class _Never(Pace):
    def choose(self, load: Hashable, acceptances: Sequence[Acceptance], *more: Any) -> list[int]:
        return [0] * len(acceptances)


@pytest.fixture(scope="module")
def served(adopt_tiny: Adopt) -> LoadedModel:
    return adopt_tiny(LlamaConfig(**BASE))


@pytest.fixture(scope="module")
def save(
    adopt_tiny: Adopt, tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., str]:
    """Saves a tiny model of a config; its folder."""

    def write(**fields: Any) -> str:
        folder = tmp_path_factory.mktemp("drafts")
        adopt_tiny(LlamaConfig(**fields)).model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return str(folder)

    return write


@pytest.fixture(scope="module")
def same(save: Callable[..., str]) -> str:
    """The served model itself, on disk."""
    return save(**BASE)


@pytest.fixture(scope="module")
def other(save: Callable[..., str]) -> str:
    """Another random model, with fewer positions and a vocabulary that is padded less."""
    return save(**SMALLER | {"vocab_size": 90, "max_position_embeddings": 160})


def engine(loaded: LoadedModel, model: str | None, **options: Any) -> Engine:
    """An engine that always drafts by `model`, or never."""
    if model is None:
        return small_engine(loaded, **options)
    given = options.pop("drafts", {})
    drafts = {"method": "draft_model", "model": model, "num_speculative_tokens": MOST} | given
    built = small_engine(loaded, speculative_config=drafts, **options)
    speculation_of(built)._pace = _Always(MOST)
    return built


def answers(
    built: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> dict[tuple[str, int], list[int]]:
    """The tokens of each completion of each prompt; the books are checked after every step."""
    found: dict[tuple[str, int], list[int]] = {}

    def take(event: Event) -> None:
        found.setdefault((event.request_id, event.index), []).extend(event.token_ids)

    built.submit(*(Request(str(at), tuple(one), params, take) for at, one in enumerate(prompts)))
    drain(built)
    return found


def speculation_of(built: Engine) -> Speculation:
    assert built._speculation is not None
    return built._speculation


def drafter_of(built: Engine) -> ModelDrafter:
    drafter = speculation_of(built).drafter
    assert isinstance(drafter, ModelDrafter)
    return drafter


def acceptance_of(built: Engine) -> float:
    counters = speculation_of(built).counters
    assert counters.drafted
    return counters.accepted / counters.drafted


def holds_nothing(built: Engine) -> bool:
    """Whether no served sequence has left a mirror."""
    drafter = drafter_of(built)
    return not drafter.cache.sequences and not drafter._mirrors


@pytest.fixture
def prefilled(monkeypatch: pytest.MonkeyPatch) -> Callable[[Engine], list[int]]:
    """Counts the tokens of each step in which the draft model of an engine prefills."""

    def watch(built: Engine) -> list[int]:
        runner, found = drafter_of(built)._runner, list[int]()
        real = runner.run

        def count(planned: PlannedStep, *rest: Any) -> Any:
            found.append(sum(len(row.tokens) for row in planned.step.rows))
            return real(planned, *rest)

        monkeypatch.setattr(runner, "run", count)
        return found

    return watch


@pytest.mark.parametrize(
    ("drafts", "sampling"),
    few(
        [*product(["same", "other"], SAMPLINGS)],
        ("same", "greedy"),
        ("same", "seeded"),
        ("other", "two"),
    ),
)
def test_answers_are_those_without_drafts(
    served: LoadedModel, drafts: str, sampling: str, request: pytest.FixtureRequest
) -> None:
    params = SAMPLINGS[sampling]
    drafting = engine(served, request.getfixturevalue(drafts))
    expected = answers(engine(served, None), PROMPTS, params)
    assert answers(drafting, PROMPTS, params) == expected
    assert holds_nothing(drafting)
    share = acceptance_of(drafting)
    assert share > 0.95 if drafts == "same" else share < 0.5


def test_prompts_longer_than_a_step_and_answers_over_chunks(served: LoadedModel, same: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True)
    prompts = [[(11 * i + n) % 90 + 3 for i in range(260 + 31 * n)] for n in range(3)]
    drafting = engine(served, same)
    assert run(drafting, prompts, params) == run(engine(served, None), prompts, params)
    assert acceptance_of(drafting) > 0.95
    assert holds_nothing(drafting)


def test_models_with_windows_draft(
    adopt_tiny: Adopt, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    windows = adopt_tiny(MistralConfig(**BASE, sliding_window=40))
    windows.model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=70, ignore_eos=True)
    drafting = engine(windows, str(tmp_path))
    expected = answers(engine(windows, None), PROMPTS, params)
    assert answers(drafting, PROMPTS, params) == expected
    assert acceptance_of(drafting) > 0.95
    assert holds_nothing(drafting)


def test_compressed_requests_are_drafted_for(
    served: LoadedModel, same: str, tmp_path: Path
) -> None:
    options = {"kv_retention": 0.5, "profile": [profile_file(served, tmp_path)]}
    drafting = engine(served, same, **options)
    assert run(drafting, PROMPTS) == run(engine(served, None, **options), PROMPTS)
    assert speculation_of(drafting).counters.drafted


def test_preempted_sequences_go_on_as_before(served: LoadedModel, same: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    prompts = [[(5 * i + n) % 90 + 3 for i in range(70)] for n in range(6)]
    page = 2 * 2 * 8 * 8 * 4
    options = {"max_model_len": 200, "kv_cache_gib": 2 * 400 * page / 2**30}
    drafting = engine(served, same, **options)
    assert run(drafting, prompts, params) == run(engine(served, None), prompts, params)
    assert drafting.stats().preemptions
    assert speculation_of(drafting).counters.accepted
    assert holds_nothing(drafting)


def test_a_pool_too_small_for_all_drafts_for_some(served: LoadedModel, same: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
    prompts = [[(5 * i + n) % 90 + 3 for i in range(20 + 50 * n)] for n in range(4)]
    page = 2 * 2 * 8 * 8 * 4
    drafting = engine(served, same, drafts={"kv_cache_gib": 60 * page / 2**30})
    expected = run(engine(served, None), prompts, params)
    assert run(drafting, prompts, params) == expected
    counters = speculation_of(drafting).counters
    assert 0 < counters.drafted < MOST * 80
    assert not drafting.stats().preemptions
    assert holds_nothing(drafting)


def test_aborted_requests_leave_nothing(served: LoadedModel, same: str) -> None:
    drafting = engine(served, same)
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    events: list[Event] = []
    for number, prompt in enumerate(PROMPTS):
        drafting.submit(Request(str(number), tuple(prompt), params, events.append))
    for _ in range(8):
        drafting.step()
        check_books(drafting)
    assert drafter_of(drafting).cache.sequences
    for number in range(len(PROMPTS)):
        drafting.abort(str(number))
    drain(drafting)
    drafting.step()
    assert holds_nothing(drafting)
    drafting.clear_cache()
    cache = drafter_of(drafting).cache
    assert cache.ledger.free == cache.ledger.total


def test_a_turn_reads_only_what_is_new_to_the_draft_model(
    served: LoadedModel, same: str, prefilled: Callable[[Engine], list[int]]
) -> None:
    drafting = engine(served, same)
    steps = prefilled(drafting)
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    answer = answers(drafting, [PROMPTS[2]], params)["0", 0]
    assert sum(steps) >= len(PROMPTS[2])
    steps.clear()
    answers(drafting, [[*PROMPTS[2], *answer, 40, 41, 42]], params)
    # The rest of a page, what came since, and the chunk that this turn fills.
    assert steps[0] <= 8 + 3
    assert sum(steps) <= 8 + 3 + 32


def test_a_draft_that_is_accepted_needs_no_prefill(
    served: LoadedModel, same: str, prefilled: Callable[[Engine], list[int]]
) -> None:
    drafting = engine(served, same)
    steps = prefilled(drafting)
    run(drafting, PROMPTS[:1])
    assert steps == [len(PROMPTS[0])]


def test_equal_prompts_are_read_once(
    served: LoadedModel, same: str, prefilled: Callable[[Engine], list[int]]
) -> None:
    drafting = engine(served, same)
    steps, prompt = prefilled(drafting), PROMPTS[2][:40]
    speculation_of(drafting)._pace = _Never(MOST)
    run(drafting, [prompt])  # now all that have this prompt begin at once
    speculation_of(drafting)._pace = _Always(MOST)
    run(drafting, [prompt] * 3)
    assert len(prompt) <= sum(steps) < len(prompt) + 32


def test_the_mirror_used_least_recently_makes_space(served: LoadedModel, same: str) -> None:
    class Newest(Pace):
        def choose(
            self, load: Hashable, acceptances: Sequence[Acceptance], *more: Any
        ) -> list[int]:
            return [0] * (len(acceptances) - 1) + [MOST] * bool(acceptances)

    page = 2 * 2 * 8 * 8 * 4
    drafting = engine(served, same, drafts={"kv_cache_gib": 80 * page / 2**30})
    speculation_of(drafting)._pace = Newest(MOST)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    mirrors = drafter_of(drafting)._mirrors
    for name in "ab":
        prompt = tuple((7 * i + ord(name)) % 90 + 3 for i in range(70))
        drafting.submit(Request(name, prompt, params, lambda event: None))
        for _ in range(4):
            drafting.step()
            check_books(drafting)
        assert [one.request_id for one in mirrors.values() if one.cache is not None] == [name]
    drain(drafting)
    assert holds_nothing(drafting)


def test_a_sequence_longer_than_the_draft_model_reads_goes_on(
    served: LoadedModel, other: str, caplog: pytest.LogCaptureFixture
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    drafting = engine(served, other)
    assert mentions(caplog.text, "160")
    prompts = [PROMPTS[2], [4] * 170]
    assert run(drafting, prompts, params) == run(engine(served, None), prompts, params)
    assert speculation_of(drafting).counters.drafted > 0
    assert holds_nothing(drafting)


def test_another_tokenizer_is_refused(
    served: LoadedModel, folder: Path, save: Callable[..., str]
) -> None:
    with pytest.raises(ConfigError, match=mentioning("tokenizer llama")) as error:
        config = {"method": "draft_model", "model": str(folder)}
        small_engine(served, speculative_config=config, load_format="dummy")
    assert str(folder) in str(error.value)


def test_tokens_are_compared_before_weights_are_read(same: str, tmp_path: Path) -> None:
    """Loading two models takes minutes."""
    other = shutil.copytree(same, tmp_path / "other")
    (other / "model.safetensors").write_bytes(b"damaged")
    words = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(other)
    drafts = json.dumps({"method": "draft_model", "model": str(other)})
    command = ["generate", same, "-p", "a", "--kv-retention", "1", "--speculative-config", drafts]
    refused = CliRunner().invoke(app, command)
    assert refused.exit_code == 2 and mentions(refused.stderr, f"tokenizer {same}")


def test_a_share_that_leaves_nothing_is_refused(served: LoadedModel, same: str) -> None:
    for share in (0.00001, 0.00999):
        facts = f"speculative_config.kv_cache_gib {share} 1.907e-05 0.009981"
        with pytest.raises(ConfigError, match=mentioning(facts)):
            engine(served, same, drafts={"kv_cache_gib": share})


def test_the_pools_share_the_configured_memory(served: LoadedModel, other: str) -> None:
    drafting = engine(served, other)
    cache, stats = drafter_of(drafting).cache, drafting.stats()
    retention = drafter_of(drafting)._retention
    held = stats.pages_total * stats.page_bytes
    own = cache.ledger.total * retention.layout.page_bytes(4)
    total = 0.01 * 2**30
    assert 0.98 * total < held + own <= total
    tokens = retention.layout.tokens_in(cache.ledger.total, drafting.max_model_len)
    assert tokens == pytest.approx(stats.capacity_tokens, abs=retention.layout.chunk_tokens)


WINDOWS = st.lists(st.none() | st.integers(1, 30), min_size=1, max_size=3)


@settings(max_examples=60, deadline=None)
@given(WINDOWS, WINDOWS, st.integers(1, 96), st.integers(40_000, 200_000))
@example([None], [None], 8, 51_199)
def test_both_pools_fit_into_the_memory_whatever_windows_the_models_have(
    own: list[int | None], others: list[int | None], length_tokens: int, total: int
) -> None:
    """Each pool has the same share of its sequences, which windows may change."""
    drafts = DraftModel(num_speculative_tokens=2, model="other")
    served, drafting = (
        PoolShape(entry, entry.page_bytes(4), length_tokens)
        for entry in (layout(4, model=geometry(len(one), 2, one)) for one in (own, others))
    )
    share = draft_bytes(total, drafts, served, drafting)
    served_pages = (total - share) // served.page_bytes
    tokens = served.layout.tokens_in(served_pages, length_tokens)
    pages = draft_pages(drafts, served_pages, served, drafting)
    assert drafting.least_bytes <= pages * drafting.page_bytes <= share
    held = drafting.layout.tokens_in(pages, length_tokens)
    assert held == pytest.approx(tokens, abs=2 * drafting.sequence_tokens)


def test_the_embedded_model_accepts_what_it_drafts_itself(loaded: LoadedModel) -> None:
    options: dict[str, Any] = {
        "dtype": "float32",
        "kv_retention": 1.0,
        "kv_cache_gib": 0.25,
        "max_model_len": 1024,
        "chunk_tokens": 128,
        "max_num_batched_tokens": 512,
        "max_num_seqs": 2,
    }
    drafts = {"method": "draft_model", "model": "smollm2", "num_speculative_tokens": MOST}
    encode = loaded.tokenizer.encode
    prompts = [
        encode("The capital of France is Paris. The capital of Italy is"),
        encode("def add(a, b):\n    return a + b\n\n" * 4),
    ]
    drafting = engine_of(EngineConfig(**options, speculative_config=drafts), loaded)
    speculation_of(drafting)._pace = _Always(MOST)
    assert run(drafting, prompts) == run(engine_of(EngineConfig(**options), loaded), prompts)
    assert acceptance_of(drafting) == 1.0
    assert holds_nothing(drafting)
