"""Where requests go: digests of chunk keys, and the choice of a replica."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram.cache.keys import ChunkKeys, list_keys
from tangram.routing.digest import KeyDigest
from tangram.routing.replica_choice import LoadCosts, Placement, ReplicaReport, Router
from tests.core.host.device_double import layout, retentions
from tests.examples import examples


def make_chain(name: str, chunks: int) -> list[bytes]:
    return [hashlib.sha256(f"{name} {number}".encode()).digest() for number in range(chunks)]


def report(
    held: Sequence[bytes] = (),
    *,
    queued: int = 0,
    running: int = 0,
    pending: float = 0,
    free: int = 10,
) -> ReplicaReport:
    digest = KeyDigest.of(held, 1000)
    return ReplicaReport(digest, free, 10, queued, running, pending, age_s=0)


def router_of(**reports: ReplicaReport | None) -> Router:
    router = Router()
    router.set_replicas(reports)
    for name, entry in reports.items():
        if entry is not None:
            router.take_report(name, entry)
    return router


def best(router: Router, chain: Sequence[bytes]) -> str:
    return router.rank(chain)[0].replica


def send(router: Router, chain: Sequence[bytes]) -> tuple[str, Placement]:
    first = router.rank(chain)[0]
    return first.replica, router.begin(first, chain)


# -- digests ---------------------------------------------------------------------------------------


@given(st.lists(st.binary(min_size=32, max_size=32), unique=True), st.integers(0, 40), st.data())
@settings(max_examples=examples(200), deadline=None)
def test_a_digest_knows_the_beginning_of_a_chain_that_it_was_made_of(
    keys: list[bytes], limit: int, data: st.DataObject
) -> None:
    digest = KeyDigest.of(keys, limit)
    others = data.draw(
        st.lists(st.binary(min_size=32, max_size=32).filter(lambda k: k not in keys))
    )
    kept = min(limit, len(keys))
    assert len(digest) == kept
    assert digest.longest_prefix(keys) == kept
    assert digest.longest_prefix(keys[:3] + others) == min(3, kept)
    assert len(digest.to_bytes()) == 8 * kept
    assert KeyDigest.from_bytes(digest.to_bytes()) == digest


def test_bytes_that_are_no_digest_are_refused() -> None:
    with pytest.raises(ValueError, match=r"12 bytes.* 8"):
        KeyDigest.from_bytes(b"x" * 12)


def test_a_router_names_chunks_as_the_cache_does() -> None:
    tokens = np.arange(4 * 8, dtype=np.int64)
    (retention,) = retentions(layout(chunk=8))
    keys = ChunkKeys(retention, "salt")
    for count in (0, 7, 8, 9, 16, 17, 32):
        # One token is left to compute, so a chunk that ends the prompt is not looked up.
        chunks = range(1, max(0, count - 1) // 8 + 1)
        expected = [keys.after(chunk, tokens) for chunk in chunks]
        assert list_keys(retention.fingerprint, "salt", 8, tokens[:count]) == expected


# -- the choice ------------------------------------------------------------------------------------


def test_a_request_goes_where_the_longest_prefix_is() -> None:
    chain = make_chain("a", 6)
    router = router_of(x=report(chain[:2]), y=report(chain[:5]), z=report(make_chain("b", 9)))
    assert [(one.replica, one.held) for one in router.rank(chain)] == [("y", 5), ("x", 2), ("z", 0)]


def test_a_hole_in_a_chain_ends_its_prefix() -> None:
    chain = make_chain("a", 6)
    router = router_of(x=report(chain[1:]), y=report(chain[:1]))
    assert best(router, chain) == "y"


def test_an_overloaded_holder_is_passed_over_once_the_wait_exceeds_what_it_saves() -> None:
    chain = make_chain("a", 10)
    saved = 10 * LoadCosts().anew
    # Where the pool is full, what the prefix saves counts twice.
    for free, most in ((10, saved), (0, 2 * saved + LoadCosts().anew)):
        for pending, expected in ((most - 0.5, "holder"), (most + 0.5, "other")):
            holder = report(chain, pending=pending, free=10)
            router = router_of(holder=holder, other=report(free=free))
            assert best(router, chain) == expected
    queue = 1 + int(saved / LoadCosts().queued)
    assert best(router_of(holder=report(chain, queued=queue), other=report()), chain) == "other"


def test_equal_prefixes_go_to_the_smaller_load_then_to_the_emptier_pool() -> None:
    chain = make_chain("a", 4)
    assert best(router_of(x=report(chain, running=3), y=report(chain, running=2)), chain) == "y"
    assert best(router_of(x=report(chain, free=3), y=report(chain, free=4)), chain) == "y"


def test_requests_that_come_between_two_reports_share_a_prefix_and_spread_out() -> None:
    router = router_of(x=report(), y=report())
    chain = make_chain("a", 8)
    first, _ = send(router, chain)
    assert best(router, [*chain, *make_chain("b", 1)]) == first
    # A conversation that shares nothing goes to the other.
    assert best(router, make_chain("c", 8)) != first


def test_what_a_request_has_left_counts_until_the_next_report_says_otherwise() -> None:
    router, chain = router_of(x=report(), y=report(running=1)), make_chain("a", 8)
    name, placement = send(router, chain)
    router.end(placement)
    assert (name, router.rank(chain)[0].held) == ("x", 8)
    router.take_report("x", report())  # it was evicted at once
    assert [one.held for one in router.rank(chain)] == [0, 0]


def test_a_request_that_runs_through_a_report_still_counts_as_held() -> None:
    router, chain = router_of(x=report(), y=report(running=1)), make_chain("a", 8)
    _, placement = send(router, chain)
    router.take_report("x", report(running=1, pending=9))
    assert {one.replica: one.held for one in router.rank(chain)} == {"x": 8, "y": 0}
    router.end(placement)
    router.take_report("x", report(chain))
    assert router.rank(chain)[0].held == 8


def test_a_replica_without_a_report_gets_what_would_wait_elsewhere() -> None:
    chain = make_chain("a", 4)
    router = router_of(new=None, old=report(chain), busy=report(pending=60))
    assert best(router, chain) == "old"
    router = router_of(new=None, old=report(chain, pending=90), idle=report(pending=10))
    ranked = router.rank(make_chain("b", 4))
    assert [one.replica for one in ranked] == ["idle", "new", "old"]


def test_stale_reports_say_nothing() -> None:
    now = 0.0
    router, chain = Router(stale_s=10, clock=lambda: now), make_chain("a", 4)
    router.set_replicas(["x", "y"])
    for name in ("x", "y"):
        router.take_report(name, report(chain if name == "y" else ()))
    assert best(router, chain) == "y"
    now = 20.0
    assert all(one.held == 0 for one in router.rank(chain))
    router.take_report("x", report())
    assert [one.replica for one in router.rank(chain)] == ["x", "y"]


def test_a_replica_that_is_gone_is_not_chosen_and_its_requests_can_still_end() -> None:
    chain = make_chain("a", 4)
    router = router_of(x=report(chain), y=report())
    _, placement = send(router, chain)
    router.set_replicas(["y"])
    router.take_report("x", report(chain))
    assert [one.replica for one in router.rank(chain)] == ["y"]
    router.set_replicas(["x", "y"])  # it starts again, empty
    router.end(placement)
    router.take_report("x", report())
    assert [one.held for one in router.rank(chain)] == [0, 0]


def test_without_replicas_there_is_no_candidate() -> None:
    assert Router().rank(make_chain("a", 2)) == []


def test_a_system_prompt_draws_no_new_conversation_to_the_replica_that_has_it_already() -> None:
    system = make_chain("the system's prompt", 4)
    router = router_of(x=report(), y=report(), z=report(), w=report())
    sent = list[str]()
    for number in range(40):
        name, placement = send(router, [*system, *make_chain(str(number), 2)])
        sent.append(name)
        router.end(placement)
        router.take_report(name, report(system))
    assert max(map(sent.count, "xyzw")) <= 13 and min(map(sent.count, "xyzw")) >= 8
    # One conversation alone is none: it stays where it is, however long.
    router, chain = router_of(x=report(), y=report()), make_chain("a", 40)
    names = set[str]()
    for turn in range(1, 40):
        name, placement = send(router, chain[:turn])
        names.add(name)
        router.end(placement)
        router.take_report(name, report(chain[:turn]))
    assert len(names) == 1


# -- without statistics ----------------------------------------------------------------------------


@given(st.integers(2, 12), st.integers(0, 30))
@settings(max_examples=examples(40), deadline=None)
def test_without_reports_a_conversation_keeps_its_replica_when_others_come_and_go(
    replicas: int, conversations: int
) -> None:
    names = [f"replica {number}" for number in range(replicas)]
    chains = [make_chain(str(number), 3) for number in range(conversations)]
    router = Router()
    router.set_replicas(names)
    before = [best(router, chain) for chain in chains]
    assert [best(router, [*chain, b"more" * 8]) for chain in chains] == before
    router.set_replicas(names[1:])
    after = [best(router, chain) for chain in chains]
    assert [
        (old, new) for old, new in zip(before, after, strict=True) if old not in (names[0], new)
    ] == []


def test_without_reports_a_beginning_that_all_share_does_not_fill_one_replica() -> None:
    router, chain = Router(), make_chain("the system's prompt", 1)
    router.set_replicas(["x", "y", "z", "w"])
    sent = [send(router, [*chain, *make_chain(str(number), 2)])[0] for number in range(40)]
    assert max(map(sent.count, sent)) <= 1 + 1.25 * 40 / 4 + 1
    assert len(set(sent)) >= 3


def test_without_reports_short_prompts_spread_out() -> None:
    router = Router()
    router.set_replicas(["x", "y"])
    assert sorted(send(router, [])[0] for _ in range(6)) == ["x"] * 3 + ["y"] * 3


def test_what_was_sent_is_forgotten_where_nothing_is_reported() -> None:
    router = Router()
    router.set_replicas(["x"])
    for number in range(10):
        router.end(send(router, make_chain(str(number), 5))[1])
    router.take_report("x", report())
    assert [router.rank(make_chain(str(number), 5))[0].held for number in range(10)] == [0] * 10


# -- any order of events ---------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(st.sampled_from(["send", "end", "report", "lose", "join"]), st.integers(0, 7))
    )
)
@settings(max_examples=examples(200), deadline=None)
def test_any_order_of_events_leaves_a_ranking_of_the_replicas_there_are(
    events: list[tuple[str, int]],
) -> None:
    router, names = Router(), {"r0", "r1", "r2"}
    router.set_replicas(names)
    running = list[Placement]()
    for event, number in events:
        if event == "send" and names:
            running.append(send(router, make_chain(str(number), number))[1])
        elif event == "end" and running:
            router.end(running.pop(number % len(running)))
        elif event == "report":
            router.take_report(f"r{number}", report(make_chain(str(number), number)))
        elif event in ("lose", "join"):
            names = names - {f"r{number}"} if event == "lose" else names | {f"r{number}"}
            router.set_replicas(names)
        ranked = router.rank(make_chain("3", 5))
        assert {one.replica for one in ranked} == names
        assert [one.cost for one in ranked] == sorted(one.cost for one in ranked)
        assert all(0 <= one.held <= 5 for one in ranked)
