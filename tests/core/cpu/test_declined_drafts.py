"""A request may decline drafts: it decodes plainly in a batch where others are drafted for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from transformers import PretrainedConfig

from tangram.engine.loop import Engine
from tangram.errors import RequestError
from tangram.model.load import LoadedModel
from tangram.types import DraftedTokens, Event, Request
from tests.core.cpu.test_speculative_answers import PROMPTS, SETTINGS, TINY, DraftingEngines
from tests.small_engines import drain, profile_file, run
from tests.speculation import draft_always, few

GREEDY = SETTINGS["greedy"]


@pytest.fixture(scope="module")
def world(
    adopt_tiny: Callable[[PretrainedConfig], LoadedModel], tmp_path_factory: pytest.TempPathFactory
) -> DraftingEngines:
    return DraftingEngines(adopt_tiny(TINY), tmp_path_factory.mktemp("profiles"))


def drafts_and_answers(
    engine: Engine, asked: list[bool | None]
) -> list[tuple[DraftedTokens | None, list[int]]]:
    """What was drafted for each of as many requests for one prompt, all at once, and its answer."""
    events: list[list[Event]] = [[] for _ in asked]
    for number, speculative in enumerate(asked):
        take = events[number].append
        prompt = tuple(PROMPTS[0])
        engine.submit(Request(str(number), prompt, GREEDY, take, speculative=speculative))
    drain(engine)
    return [
        (own[-1].usage.drafted, [token for event in own for token in event.token_ids])
        for own in events
    ]


@pytest.mark.parametrize(
    "method", few(["ngram", "suffix", "compressed_kv", "draft_model"], "ngram", "compressed_kv")
)
def test_what_declines_drafts_has_none_beside_those_that_have(
    world: DraftingEngines, method: str
) -> None:
    engine = draft_always(world.engine(method))
    found = drafts_and_answers(engine, [None, False, True])
    (absent, first), (declined, second), (wanted, third) = found
    assert declined == DraftedTokens(0, 0)
    for drafted in (absent, wanted):
        assert drafted is not None and drafted.accepted > 0
    assert first == second == third == run(world.engine(None), [PROMPTS[0]], GREEDY)[0]


def test_steps_in_which_all_decline_follow_on_those_with_drafts(world: DraftingEngines) -> None:
    """The pace knows what drafts cost by then, and nobody is left to choose them for."""
    engine, expected = world.engine("ngram"), run(world.engine(None), [PROMPTS[0]], GREEDY)[0]
    for asked in ([None], [None, True], [False], [None, False], [False, False]):
        for drafted, found in drafts_and_answers(engine, asked):
            assert drafted is not None and found == expected


def test_a_server_without_drafts_refuses_to_draft(world: DraftingEngines) -> None:
    engine = world.engine(None)
    take: list[Event] = []
    with pytest.raises(RequestError, match=r"speculative .*--speculative-config") as told:
        engine.submit(Request("0", (3, 4), GREEDY, take.append, speculative=True))
    assert told.value.field == "speculative" and not engine.busy
    assert drafts_and_answers(engine, [False])[0][0] is None


def test_drafts_read_the_default_scorer_beside_profiles_of_others(
    world: DraftingEngines, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("others")
    others = [profile_file(world.loaded, folder, scorer=name) for name in ("tova", "keydiff")]
    engine = draft_always(world.engine("compressed_kv", scorer=None, profiles=tuple(others)))
    full, *compressed = engine.admission.retentions
    assert full.draft is not None
    assert (full.kv_retention, full.scorer, full.draft.scorer) == (1.0, "tova", "tova")
    assert [entry.scorer for entry in compressed] == ["tova", "keydiff"]
    plain = run(world.engine(None), PROMPTS, GREEDY)
    assert run(engine, PROMPTS, GREEDY) == plain
    assert run(engine, PROMPTS, GREEDY, kv_retention=0.5, kv_scorer="keydiff") == run(
        world.engine(None, kv_retention=0.5), PROMPTS, GREEDY
    )
