"""The prefix cache against a plain model of least-recently-used, and the keys that keep tenants
apart.
"""

from __future__ import annotations

import pickle

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tangram.cache.host import HostTier
from tangram.cache.keys import chunk_key, raw_key, root_key, window_key
from tangram.cache.pages import Ledger
from tangram.cache.prefix import Link, Node, PrefixCache

PAGES = 40


class Shelf(RuleBasedStateMachine):
    """Chains are stood on, left and evicted. The model lists idle links by when they were last
    left.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(PAGES)
        self.cache = PrefixCache(self.ledger, HostTier(0, PAGES))
        self.standing: list[list[Node]] = []
        self.idle: list[Node] = []  # least recently used first

    def _stand(self, path: tuple[int, ...], link: Link) -> list[Node]:
        chain: list[Node] = []
        for depth in range(len(path)):
            key = repr(path[: depth + 1]).encode()
            node = self.cache.find(key)
            if node is None:
                pages = self.ledger.take(1 + path[depth])
                node = self.cache.insert(key, chain[-1] if chain else None, pages, link)
                self.ledger.release(pages)
            elif node in self.idle:
                self.idle.remove(node)
            self.cache.acquire(node)
            chain.append(node)
        return chain

    @precondition(lambda self: self.ledger.free >= 12)
    @rule(
        path=st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple),
        link=st.sampled_from(Link),
    )
    def stand(self, path: tuple[int, ...], link: Link) -> None:
        self.standing.append(self._stand(path, link))

    @precondition(lambda self: self.standing)
    @rule(which=st.integers(0, 99))
    def leave(self, which: int) -> None:
        for node in reversed(self.standing.pop(which % len(self.standing))):
            self.cache.release(node)
            if not any(node in chain for chain in self.standing):
                self.idle.append(node)

    @rule(pages=st.integers(0, 20))
    def evict(self, pages: int) -> None:
        freed, before = 0, set(self.cache.nodes.values())
        expected: set[Node] = set()
        while self.idle and freed < pages:
            expected.add(self.idle[0])
            freed += len(self.idle.pop(0).pages)
        self.cache.evict(pages)
        assert before - set(self.cache.nodes.values()) == expected

    @invariant()
    def books(self) -> None:
        used = {node for chain in self.standing for node in chain}
        assert set(self.cache.nodes.values()) == used | set(self.idle)
        assert self.cache.idle_pages == sum(len(node.pages) for node in self.idle)
        stood = [node for chain in self.standing for node in chain if node.transient]
        assert self.cache.crowded_pages == sum(len(n.pages) for n in stood) - sum(
            len(n.pages) for n in set(stood)
        )
        assert self.ledger.free == PAGES - sum(
            len(node.pages) for node in self.cache.nodes.values()
        )

    def teardown(self) -> None:
        while self.standing:
            self.leave(0)
        self.cache.clear()
        assert self.ledger.free == PAGES and not self.cache.nodes


TestShelf = Shelf.TestCase
TestShelf.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_links_in_steady_use_do_not_pile_up_memory() -> None:
    cache = PrefixCache(Ledger(4), HostTier(0, 4))
    node = cache.insert(b"hot", None, cache.ledger.take(1), Link.CHUNK)

    def size_after(uses: int) -> int:
        for _ in range(uses):
            cache.acquire(node)
            cache.release(node)
        return len(pickle.dumps(cache))

    few = size_after(500)
    assert size_after(5000) <= few + 5000


TEXT = st.text(max_size=8) | st.text(st.characters(categories=["Cs"]), max_size=3)


@settings(max_examples=100, deadline=None)
@given(st.tuples(TEXT, TEXT), st.tuples(TEXT, TEXT))
def test_only_equal_profiles_and_salts_start_the_same_chain(
    one: tuple[str, str], other: tuple[str, str]
) -> None:
    assert (root_key(*one) == root_key(*other)) == (one == other)


def test_a_fingerprint_and_a_salt_are_not_simply_joined() -> None:
    pairs = [("ab", "c"), ("a", "bc"), ("", "abc"), ("1", ":a"), ("1:", "a")]
    assert len({root_key(fingerprint, salt) for fingerprint, salt in pairs}) == len(pairs)


def test_a_chunk_a_raw_page_and_a_window_part_of_the_same_tokens_are_three_links() -> None:
    parent, tokens = root_key("profile", ""), np.arange(4)
    chunk = chunk_key(parent, tokens)
    assert len({chunk, raw_key(parent, tokens), window_key(chunk), window_key(parent)}) == 4
    assert (
        chunk_key(parent, tokens)
        != chunk_key(parent, tokens[::-1].copy())
        != chunk_key(chunk, tokens)
    )
