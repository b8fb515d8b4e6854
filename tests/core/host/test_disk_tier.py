"""A disk behind host memory: a restart finds what was computed, and few wait for it."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest

from tangram.cache.disk import MOST_WAITING_BYTES, DiskTier
from tangram.cache.fetching import MOST_FETCH_S
from tangram.cache.keys import ChunkKeys
from tangram.cache.layout import Layout
from tangram.config import EngineConfig
from tangram.errors import ConfigError
from tangram.types import LinkName
from tests.core.host.device_double import geometry, layout
from tests.core.host.disk_double import DictStore, DiskDouble
from tests.core.host.scheduled_device import ScheduledDevice
from tests.mentions import mentioning, mentions

PROMPT = [at % 5 for at in range(28)]  # three chunks of 8, and some


def start(
    store: DictStore,
    before: ScheduledDevice | None = None,
    only: Layout | None = None,
    host_spans: int = 100,
) -> ScheduledDevice:
    """A service over `store`, or one that replaces `before`."""
    only = only or layout(2)
    return ScheduledDevice(
        [only],
        slack_pages=100,
        max_num_seqs=2,
        host_pages=host_spans * only.span_pages,
        kept=before.retentions if before else (),
        disk=DiskDouble(store),
    )


def serve(service: ScheduledDevice, prompt: list[int], max_new: int = 2) -> int:
    """How many tokens of a prompt were cached; all that waits for the disk is written then."""
    sequence = service.submit(prompt, max_new)
    service.drain()
    # As the engine does, when no other step may come.
    service.device.move(service.manager.take_moves(())[0])
    assert service.disk is not None
    service.disk.writing.run()
    assert sequence.cached_tokens is not None
    return sequence.cached_tokens


def list_known(service: ScheduledDevice, prompt: list[int]) -> list[bytes]:
    """The keys of the chunks of a prompt that memory has."""
    keys = ChunkKeys(service.retentions[0], "")
    return service.manager.prefix.longest(keys, np.asarray(prompt, np.int64)).chunks


@pytest.mark.parametrize("windows", [(None, None), (None, 5), (5, 5)])
def test_a_restart_finds_whole_chunks_of_every_conversation(
    windows: tuple[int | None, ...],
) -> None:
    store = DictStore(1000)
    service = start(store, only=layout(2, model=geometry(2, 2, windows)))
    assert serve(service, PROMPT) == 0
    again = start(store, service, only=service.retentions[0].layout)
    assert serve(again, PROMPT) == 24
    assert again.disk is not None and again.disk.hits == 3 + (windows[1] is not None)
    assert serve(again, [*PROMPT[:12], *PROMPT]) == 8


def test_a_damaged_chunk_and_what_is_behind_it_are_computed_again_and_written_again() -> None:
    store = DictStore(1000)
    service = start(store)
    serve(service, PROMPT)
    store.lose(1)
    service = start(store, service)
    assert serve(service, PROMPT) == 8
    store.kept = type(store.kept)({name: words for name, words in store.kept.items() if words})
    assert serve(start(store, service), PROMPT) >= 8


def test_another_salt_finds_nothing() -> None:
    store = DictStore(1000)
    service = start(store)
    serve(service, PROMPT)
    service = start(store, service)
    other = service.submit(PROMPT, 1, salt="another tenant")
    service.drain()
    assert other.cached_tokens == 0


def test_who_waits_for_the_disk_lets_the_others_run_and_pass() -> None:
    store = DictStore(1000)
    service = start(store)
    serve(service, PROMPT)
    service = start(store, service)
    running = service.submit([3, 3, 3], 8)
    service.step()
    late = service.submit(PROMPT, 1)
    passing = service.submit([2, 2], 1)
    for _ in range(3):
        step = service.step()
        assert step is not None and running.request_id in {row.request_id for row in step.rows}
    assert passing in service.ended and late in service.scheduler.fetching
    assert service.disk is not None
    service.disk.reading.run()
    service.drain()
    assert late.cached_tokens == 24


def test_an_aborted_request_is_not_awaited() -> None:
    store = DictStore(1000)
    service = start(store)
    serve(service, PROMPT)
    service = start(store, service)
    service.abort(service.submit(PROMPT, 1))
    service.check_excess()
    assert not service.alive and service.step() is None


def test_a_cleared_store_gives_nothing_that_is_being_read_and_takes_nothing_that_waits() -> None:
    store = DictStore(1000)
    service = start(store)
    serve(service, PROMPT)
    service = start(store, service)
    late = service.submit(PROMPT, 1)
    assert service.disk is not None
    service.disk.reading.run()
    service.disk.save(LinkName(b"root", b"key"), 1, lambda: np.zeros((1, 1), np.int32))
    service.disk.clear()
    service.disk.writing.run()
    service.drain()
    assert late.cached_tokens == 0 and not store.links and service.disk.dropped == 1


def test_no_more_waits_to_be_written_than_memory_is_meant_for() -> None:
    disk = DiskDouble(DictStore(1000))
    half, pages = MOST_WAITING_BYTES // 2, np.zeros((1, 1), np.int32)
    for number in range(3):
        if disk.accepts(half):
            disk.save(LinkName(b"root", bytes([number])), half, lambda: pages)
    assert disk.dropped == 1 and not disk.accepts(1)
    disk.writing.run()
    assert disk.accepts(half) and disk.store.links == 2


@pytest.mark.parametrize("error", [TypeError("wrong"), MemoryError(), OSError(5, "broken")])
def test_whatever_a_store_raises_costs_the_link_alone_and_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    store = DictStore(1000)
    service = start(store)
    serve(service, PROMPT)

    def refuse(*_: object) -> None:
        raise error

    service = start(store, service)
    monkeypatch.setattr(store, "read", refuse)
    assert serve(service, PROMPT) == 0 and mentions(caplog.text, type(error).__name__)
    caplog.clear()
    monkeypatch.setattr(store, "write", refuse)
    serve(service, [4, *PROMPT])
    assert service.disk is not None and service.disk.dropped == 3 and service.disk.accepts(1)
    assert len(caplog.messages) == 1 and mentions(caplog.text, type(error).__name__)


def test_the_longest_history_is_read_as_far_as_host_memory_holds_it() -> None:
    store = DictStore(1000)
    service = start(store)
    serve(service, PROMPT)
    assert serve(start(store, service, host_spans=2), PROMPT) == 16


@pytest.mark.parametrize(("host_spans", "found"), [(7, 40), (5, 40), (4, 32), (3, 24)])
def test_a_fetch_keeps_the_beginning_of_its_chain_in_host_memory(
    host_spans: int, found: int
) -> None:
    service = start(DictStore(1000), host_spans=host_spans)
    prompts = [[at % 5 for at in range(42)], [at % 3 for at in range(42)]]
    for prompt in (*prompts, prompts[0]):
        cached = serve(service, prompt)
        service.manager.prefix.evict(service.manager.ledger.total)
        service.device.move(service.manager.take_moves(())[0])
    assert cached == found


def test_of_a_chain_that_was_fetched_the_end_leaves_host_memory_first() -> None:
    service = start(DictStore(1000), host_spans=7)
    serve(service, PROMPT)
    keys = list_known(service, PROMPT)
    service.manager.prefix.clear()
    for _ in range(2):  # there is no place for a third
        service.submit([3, 3, 3], 8)
    service.step()
    service.submit(PROMPT, 1)
    assert service.disk is not None
    service.disk.reading.run()
    service.step()
    assert service.scheduler.waiting and [*service.manager.host.links] == keys[::-1]


def test_what_host_memory_has_of_a_chain_leaves_less_room_for_the_rest() -> None:
    service = start(DictStore(1000), host_spans=3)
    serve(service, [*PROMPT, *PROMPT[:14]])
    service.manager.prefix.evict(service.manager.ledger.total)
    service.device.move(service.manager.take_moves(())[0])
    assert service.submit([*PROMPT, *PROMPT[:14]], 1) not in service.scheduler.fetching


def test_prompts_that_begin_alike_share_reads_and_the_last_to_go_cancels_them() -> None:
    store = DictStore(1000)
    service = start(store)
    serve(service, PROMPT)
    service = start(store, service)
    assert service.disk is not None
    jobs, pages = service.disk.reading.jobs, 3 * service.retentions[0].layout.span_pages
    one, other = service.submit(PROMPT, 1), service.submit([*PROMPT, 1], 1)
    assert len(jobs) == 3 + 1 and service.disk.reading_pages == pages
    fetch, _ = service.scheduler.fetching.values()
    reads = [read.found for read in fetch.reads.values()]
    service.abort(one)
    assert service.disk.reading_pages == pages and not any(map(Future.cancelled, reads))
    service.abort(other)
    assert service.disk.reading_pages == 0 and all(map(Future.cancelled, reads))
    late = service.submit(PROMPT, 1)
    service.disk.clear()
    assert late in service.scheduler.fetching
    again = service.submit(PROMPT, 1)  # nothing is there any more
    assert again not in service.scheduler.fetching
    service.drain()
    assert late.cached_tokens is not None and service.disk.hits == 0


def test_no_more_is_read_at_a_time_than_host_memory_holds() -> None:
    store, prompts = DictStore(1000), [[stem, *PROMPT] for stem in range(5)]
    service = start(store)
    for prompt in prompts:
        serve(service, prompt)
    service = start(store, service, host_spans=7)
    assert service.disk is not None
    sequences = [service.submit(prompt, 1) for prompt in prompts]
    span = service.retentions[0].layout.span_pages
    assert service.disk.reading_pages == 6 * span
    service.abort(sequences.pop(0))  # its turn is free
    while any(entry in service.scheduler.fetching for entry in sequences):
        service.step()
        assert service.disk.reading_pages <= 7 * span
    service.drain()
    assert [entry.cached_tokens for entry in sequences] == [24] * 4


def test_a_prompt_runs_when_every_link_is_there_though_nothing_was_read_for_it() -> None:
    store = DictStore(1000)
    service = start(store)
    serve(service, PROMPT)
    service = start(store, service)
    service.submit([3, 3, 3], 8)
    late = service.submit(PROMPT, 1)
    (fetch,) = service.scheduler.fetching.values()
    for link in fetch.links:
        service.manager.host.fill(link.name.key, store.kept[link.name], link.parent)
    service.step()
    assert late.cached_tokens == 24
    assert service.disk is not None and service.disk.hits == service.disk.reading_pages == 0


def test_nobody_waits_for_long_for_a_disk_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    store = DictStore(1000)
    service = start(store)
    serve(service, PROMPT)
    serve(service, PROMPT[::-1])
    service = start(store, service)
    running, late = service.submit([3, 3, 3], 12), service.submit(PROMPT, 1)
    (fetch,) = service.scheduler.fetching.values()
    assert service.disk is not None
    service.disk.reading.run(2)  # it is told what is read next, and reads one link
    hanging = fetch.reads[fetch.links[1].name].found
    hanging.set_running_or_notify_cancel()
    now_s = time.monotonic()
    service.step()
    assert late in service.scheduler.fetching
    monkeypatch.setattr(time, "monotonic", lambda: now_s + MOST_FETCH_S + 1)
    service.step()
    assert running in service.alive and late.cached_tokens == 8 and service.disk.hits == 1
    assert service.disk.hangs and service.disk.reading_pages == 0
    for hangs in (True, False):
        other = service.submit(PROMPT[::-1], 1)
        assert (other not in service.scheduler.fetching) is hangs
        service.abort(other)
        if hangs:
            hanging.set_result(None)


def test_the_end_does_not_wait_for_ever_for_a_disk_that_hangs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers = threading.Event()

    class Hanging(DictStore):
        def look(self, limit_bytes: int) -> None:
            answers.wait()

    disk = DiskTier(Hanging(9), 4, ThreadPoolExecutor(1), ThreadPoolExecutor(1))
    disk.save(LinkName(b"root", b"key"), 7, lambda: np.zeros((1, 1), np.int32))
    monkeypatch.setattr("tangram.cache.disk.MOST_CLOSE_S", 0.05)
    try:
        with caplog.at_level(logging.WARNING, "tangram"):
            disk.close()
    finally:
        answers.set()
    assert mentions(caplog.text, "kv_disk_path 0.05 7 bytes")


def test_the_ends_of_conversations_that_were_just_written_go_first() -> None:
    store = DictStore(1000)
    service = start(store)
    serve(service, PROMPT[:24], max_new=1)  # it ends with the step that seals its last chunk
    keys = list_known(service, PROMPT)
    assert [name.key for name in store.kept] == keys[::-1]


def test_a_slow_disk_is_not_told_endlessly_what_is_in_use() -> None:
    disk = DiskDouble(DictStore(1000))
    names = [LinkName(b"root", bytes([number])) for number in range(250)]
    for _ in range(2 * MOST_WAITING_BYTES // (250 * 256)):
        disk.touch(names)
    assert len(disk.writing.jobs) < 1 + MOST_WAITING_BYTES // (250 * 256) + 1
    assert not disk.accepts(256 * 250)
    disk.writing.run()
    assert disk.accepts(MOST_WAITING_BYTES) and disk.dropped == 1


def test_only_what_is_used_counts_as_found() -> None:
    store = DictStore(1000)
    service = start(store)
    serve(service, PROMPT)
    root = next(iter(store.kept)).root
    for name in store.kept:
        if name.key == root:
            store.kept[name] = None
    service = start(store, service)
    assert serve(service, PROMPT) == 0
    assert service.disk is not None and service.disk.hits == service.manager.host.used == 0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"kv_disk_path": "x"}, "kv_disk_path x kv_disk_gib 0.0"),
        ({"kv_disk_gib": 1.0}, "kv_disk_path None kv_disk_gib 1.0"),
        ({"kv_disk_path": "x", "kv_disk_gib": 1.0}, "kv_disk_path x kv_offload_gib 0"),
        ({"kv_disk_gib": -1.0}, "kv_disk_gib -1.0"),
        ({"kv_disk_path": "", "kv_disk_gib": 1.0, "kv_offload_gib": 1.0}, "kv_disk_path '' folder"),
        (
            {
                "kv_disk_path": "x",
                "kv_disk_gib": 1.0,
                "kv_offload_gib": 1.0,
                "tensor_parallel_size": 2,
            },
            "kv_disk_path x tensor_parallel_size 2",
        ),
    ],
)
def test_what_a_disk_lacks_is_named(options: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=mentioning(named)):
        EngineConfig(**options)  # type: ignore[arg-type]
