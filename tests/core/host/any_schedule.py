"""Requests that come, end and are aborted in any order, with a look at the pool at each moment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from hypothesis import strategies as st

from tangram.cache.layout import Layout
from tangram.cache.manager import CacheManager
from tests.core.host.scheduled_device import ScheduledDevice

_Service = TypeVar("_Service", bound=ScheduledDevice)


def run_any_schedule(
    data: st.DataObject,
    layouts: Sequence[Layout],
    kind: type[_Service],
    check: Callable[[CacheManager], object],
) -> _Service:
    """A service of `kind` after a schedule that `data` draws, with nothing left to do. `check` has
    seen its manager after every step and every abort.
    """
    service = kind(
        layouts,
        slack_pages=data.draw(st.integers(0, 40)),
        max_num_seqs=data.draw(st.integers(1, 4)),
        host_pages=data.draw(st.sampled_from([0, 30])),
        ahead=data.draw(st.booleans()),
        apart=data.draw(st.sampled_from([0, 4])),
    )
    for number in range(data.draw(st.integers(3, 8))):
        start, length = data.draw(st.integers(0, 1)), data.draw(st.integers(1, 30))
        prompt = [(start + at) % 5 for at in range(length)]
        service.submit(prompt, data.draw(st.integers(1, 12)), layout=number % 2)
        for _ in range(data.draw(st.integers(0, 4))):
            service.step()
            check(service.manager)
        if service.alive and data.draw(st.booleans()):
            service.abort(service.alive[0])
            check(service.manager)
    service.drain()
    return service
