"""Other threads leave jobs and read what was published; they wait for no step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from transformers import LlamaConfig, PretrainedConfig

from tangram.errors import EngineError
from tangram.model.load import LoadedModel
from tangram.types import Event, Request, SamplingParams
from tests.small_engines import check_books, small_engine

LLAMA = LlamaConfig(
    vocab_size=512,
    hidden_size=48,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=3,
    head_dim=16,
    max_position_embeddings=512,
)
PARAMS = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
Adopt = Callable[[PretrainedConfig], LoadedModel]


@pytest.fixture(scope="module")
def loaded(adopt_tiny: Adopt) -> LoadedModel:
    return adopt_tiny(LLAMA)


def test_who_asks_while_a_client_is_told_does_not_wait(loaded: LoadedModel) -> None:
    """A client that takes long to hear of a token holds up the engine's thread and nobody else."""
    engine, told, go_on, ended = small_engine(loaded), *(threading.Event() for _ in range(3))

    def hear_slowly(event: Event) -> None:
        told.set()
        go_on.wait(60)

    def hear(event: Event) -> None:
        if event.finish_reason is not None:
            ended.set()

    engine.start()
    engine.submit(Request("slow", (5, 6, 7), PARAMS, hear_slowly))
    assert told.wait(60)
    begin_s = time.monotonic()
    engine.submit(Request("other", (8, 9), PARAMS, hear))
    assert engine.stats().running == 1
    assert engine.waiting == 0
    engine.abort("nobody")
    waited_s = time.monotonic() - begin_s
    assert not ended.is_set(), "the engine's thread is held up all the while"
    go_on.set()
    assert ended.wait(60)
    engine.stop()
    assert waited_s < 50, "the other thread may wait for a minute"


def test_the_books_are_those_at_the_end_of_the_last_answer(loaded: LoadedModel) -> None:
    engine, found = small_engine(loaded), list[tuple[int, int]]()
    ended = threading.Event()

    def hear(event: Event) -> None:
        if event.finish_reason is not None:
            stats = engine.stats()
            found.append((stats.running, stats.generated_tokens))
            ended.set()

    engine.start()
    engine.submit(Request("one", (5, 6, 7), PARAMS, hear))
    assert ended.wait(60)
    check_books(engine)
    engine.clear_cache()
    assert found == [(0, 3)]
    engine.stop()
    assert engine.stats().pages_free == engine.stats().pages_total


def test_an_engine_that_has_stopped_takes_nothing_in(loaded: LoadedModel) -> None:
    engine = small_engine(loaded)
    engine.start()
    engine.stop()
    assert not engine._mail.post(lambda: None), "a job that nobody would do"
    engine.clear_cache()
    check_books(engine)
    with pytest.raises(EngineError, match="stopped"):
        engine.submit(Request("late", (5,), PARAMS, lambda event: None))


def test_a_job_that_fails_leaves_the_others(loaded: LoadedModel) -> None:
    engine, told = small_engine(loaded), list[str | None]()

    def fail() -> None:
        raise MemoryError("no space for a job")

    engine._mail.post(fail)
    engine.submit(Request("next", (5,), PARAMS, lambda event: told.append(event.finish_reason)))
    with pytest.raises(MemoryError):
        engine.step()
    while engine.busy:
        engine.step()
    assert told[-1] == "length"


def test_faults_that_come_at_the_end_keep_nobody_from_hearing_of_it(loaded: LoadedModel) -> None:
    """Two ranks fail in one step: the second fault waits as a job when the engine has stopped."""
    engine, heard = small_engine(loaded), list[Event]()
    states, ended = list[bool](), threading.Event()

    def fail() -> None:
        raise EngineError("rank 1 has ended")

    def fail_twice(event: Event) -> None:
        if not heard:
            engine._mail.post(fail)
            engine._mail.post(fail)
        heard.append(event)

    def look() -> None:
        states.append(engine.healthy)
        if not engine.healthy:
            ended.set()

    engine.follow(look)
    engine.start()
    engine.submit(Request("one", (5, 6, 7), PARAMS, fail_twice))
    assert ended.wait(60), "whoever follows the engine is told of its end"
    assert heard[-1].finish_reason == "abort"
    assert engine._thread is not None
    engine._thread.join(60)
    with pytest.raises(EngineError, match="stopped"):
        engine.submit(Request("late", (5,), PARAMS, lambda event: None))
