"""Blocks of requests under random schedules: what is foretold is taken, and all comes back."""

from __future__ import annotations

import random
import time

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from engines import CHUNK, tiny_profile
from tangram_vllm.plugin import register
from tangram_vllm.slab import NoteForm, Slab, full_geometry
from tangram_vllm.spec import SlabSpec

BLOCKS = 40


def make_spec(
    kv_retention: float | None, *, notes: NoteForm | None = None, publish_decoded: bool = False
) -> SlabSpec:
    profile = None if kv_retention is None else tiny_profile(kv_retention=kv_retention)
    slab = Slab.lay_out(full_geometry(3, 2, 4, 32), profile, CHUNK, CHUNK, notes)
    plain = FullAttentionSpec(block_size=CHUNK, num_kv_heads=2, head_size=32, dtype=torch.float32)
    return SlabSpec.of(plain, slab, 3, publish_decoded=publish_decoded)


def make_manager(spec: SlabSpec) -> KVCacheManager:
    register()
    init_none_hash(sha256)
    group = KVCacheGroupSpec(["layer"], spec)
    return KVCacheManager(
        KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[group]),
        max_model_len=1024,
        max_in_flight_tokens=1024,
        scheduler_block_size=CHUNK,
        hash_block_size=CHUNK,
        enable_caching=True,
    )


class HeldRequest:
    """A request, and its row of a worker's block table, which only grows."""

    def __init__(self, name: str, prompt: list[int]) -> None:
        params = SamplingParams(max_tokens=1000)
        hasher = get_request_block_hasher(CHUNK, sha256)
        self.request = Request(name, prompt, params, None, block_hasher=hasher)
        self.cells: list[int] = []

    def advance(self, computed: int, draw: random.Random) -> None:
        """So many of the scheduled tokens stay; behind the last token there is a new one."""
        request = self.request
        request.num_computed_tokens += computed
        while request.num_tokens <= request.num_computed_tokens:
            request.append_output_token_ids(draw.randrange(100))


class RandomSchedule:
    """Requests that take steps of random size, draft, share prefixes, and are preempted."""

    def __init__(self, spec: SlabSpec, seed: int) -> None:
        self.spec, self.random = spec, random.Random(seed)
        self.manager = make_manager(spec)
        self.pool = self.manager.block_pool
        self.running: dict[str, HeldRequest] = {}
        self.made = self.preempted = self.hits = 0
        self.shared = [self.random.randrange(100) for _ in range(300)]

    def admit(self) -> None:
        self.made += 1
        own = [self.random.randrange(100) for _ in range(self.random.randrange(1, 200))]
        one = HeldRequest(
            str(self.made), self.shared[: self.random.choice([0, 64, 130, 260])] + own
        )
        hit, computed, _ = self.manager.get_computed_blocks(one.request)
        tokens = self.random.randrange(1, one.request.num_tokens - computed + 1)
        if self.manager.allocate_slots(one.request, tokens, computed, hit) is None:
            return
        self.running[one.request.request_id] = one
        one.cells = list(self.manager.get_block_ids(one.request.request_id)[0])
        self.hits += computed // CHUNK
        one.advance(computed + tokens, self.random)
        self.check(one)

    def step(self, one: HeldRequest) -> None:
        left = one.request.num_tokens - one.request.num_computed_tokens
        drafts = self.random.choice([0, 0, 3, 20]) if left == 1 else 0
        tokens = self.random.randrange(1, left + 1) + drafts
        new = self.manager.allocate_slots(one.request, tokens)
        if new is None:
            self.end(self.random.choice(list(self.running)))
            self.preempted += 1
            return
        one.cells += new.get_block_ids()[0]
        one.advance(tokens - self.random.randrange(drafts + 1), self.random)
        self.check(one)
        if one.request.num_tokens > 700 or self.random.random() < 0.01:
            self.end(one.request.request_id)

    def end(self, name: str) -> None:
        self.manager.free(self.running.pop(name).request)

    def check(self, one: HeldRequest) -> None:
        """Free and held blocks are all blocks; a row has the cells that its tokens lie in."""
        held = {block for name in self.running for block in self.manager.get_block_ids(name)[0]}
        assert self.pool.get_num_free_blocks() == BLOCKS - len(held | {0})
        form, own = self.spec, self.manager.get_block_ids(one.request.request_id)[0]
        full, rest = divmod(one.request.num_computed_tokens, CHUNK)
        sealed = range(form.columns - 1, full * form.columns, form.columns)
        raw = range(full * form.columns, full * form.columns + form.count_raw_blocks(rest))
        needed = [*sealed, *raw]
        assert all(own[place] for place in needed)
        assert [one.cells[place] for place in needed] == [own[place] for place in needed]
        assert len({own[place] for place in needed}) == len(needed)
        open_blocks = 1 if form.columns == 1 else 2 * form.raw_blocks
        assert sum(block != 0 for block in own) <= full + 1 + open_blocks


@pytest.mark.parametrize(
    ("kv_retention", "notes", "publish_decoded"),
    [
        (None, None, False),
        (None, None, True),
        (0.5, None, False),
        (0.5, NoteForm(32, 128), True),
        (0.3, None, True),
        (0.3, NoteForm(0, 128), False),
    ],
)
def test_accounts_of_random_schedules(
    kv_retention: float | None, notes: NoteForm | None, publish_decoded: bool
) -> None:
    spec = make_spec(kv_retention, notes=notes, publish_decoded=publish_decoded)
    schedule = RandomSchedule(spec, seed=1)
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline:
        if len(schedule.running) < 6:
            schedule.admit()
        for name, one in list(schedule.running.items()):
            if name in schedule.running:
                schedule.step(one)
    for name in list(schedule.running):
        schedule.end(name)
    assert schedule.pool.get_num_free_blocks() == BLOCKS - 1
    assert schedule.preempted and schedule.hits and schedule.made > 50
