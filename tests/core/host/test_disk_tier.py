"""A disk behind host memory: a restart finds what was computed, and few wait for it."""

from __future__ import annotations

import numpy as np
import pytest

from tangram.cache.disk import MOST_WAITING_BYTES
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
    store: DictStore, before: ScheduledDevice | None = None, only: Layout | None = None
) -> ScheduledDevice:
    """A service over `store`, or one that replaces `before`."""
    return ScheduledDevice(
        [only or layout(2)],
        slack_pages=100,
        max_num_seqs=2,
        host_pages=1000,
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
    span = service.retentions[0].layout.span_pages
    small = ScheduledDevice(
        [layout(2)],
        slack_pages=100,
        max_num_seqs=2,
        host_pages=2 * span,
        kept=service.retentions,
        disk=DiskDouble(store),
    )
    assert serve(small, PROMPT) == 16


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
