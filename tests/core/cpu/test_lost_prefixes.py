"""What an engine with the embedded model says of prompts that find less than there was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tangram.engine.loop import Engine
from tangram.model.load import LoadedModel
from tangram.types import Event, LossReason, LostPrefix, Request, SamplingParams
from tests.small_engines import drain, small_engine

C = 32
ANSWER = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
TEXT = (Path(__file__).parents[3] / "docs/architecture.md").read_text()


def tell(engine: Engine, prompt: tuple[int, ...], **options: Any) -> list[Event]:
    """The events of an answer."""
    events = list[Event]()
    engine.submit(Request("a", prompt, ANSWER, events.append, **options))
    drain(engine)
    return events


def texts(loaded: LoadedModel, engine: Engine) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ten chunks of a text, and the same with another token in the first chunk."""
    prompt = engine.codec.encode(TEXT)[: 10 * C + 5]
    return prompt, (*prompt[:20], prompt[20] + 1, *prompt[21:])


def test_the_first_event_says_what_a_changed_token_costs(loaded: LoadedModel) -> None:
    engine = small_engine(loaded, kv_cache_gib=0.1)
    prompt, changed = texts(loaded, engine)
    assert [event.lost for event in tell(engine, prompt)] == [None] * 4
    first, *rest = tell(engine, changed)
    assert first.lost == LostPrefix(LossReason.DIVERGED, 10 * C, 20, prompt[20:44])
    assert [event.lost for event in rest] == [None] * 3
    assert [event.lost for event in tell(engine, prompt)] == [None] * 4, "both are cached now"
    stats = engine.stats()
    assert (stats.lost_diverged, stats.lost_evicted) == (10 * C, 0)


def test_evicted_pages_are_another_reason(loaded: LoadedModel) -> None:
    engine = small_engine(loaded, kv_cache_gib=0.1)
    prompt, _ = texts(loaded, engine)
    tell(engine, prompt)
    engine.clear_cache()
    first = tell(engine, prompt + prompt[:5])[0]
    assert first.lost == LostPrefix(LossReason.EVICTED, 10 * C)
    assert engine.stats().lost_evicted == 10 * C


def test_nothing_is_said_across_clients_and_salts(loaded: LoadedModel) -> None:
    engine = small_engine(loaded, kv_cache_gib=0.1)
    prompt, changed = texts(loaded, engine)
    tell(engine, prompt, client=b"one")
    for other in ({"client": b"two"}, {"client": b"one", "cache_salt": "x"}, {"cache_salt": "one"}):
        assert tell(engine, changed, **other)[0].lost is None
    assert engine.stats().lost_diverged == 0


def test_without_a_prefix_cache_nothing_is_lost(loaded: LoadedModel) -> None:
    engine = small_engine(loaded, kv_cache_gib=0.1, enable_prefix_caching=False)
    prompt, changed = texts(loaded, engine)
    assert all(
        event.lost is None for part in (prompt, changed, prompt) for event in tell(engine, part)
    )
