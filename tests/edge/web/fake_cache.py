"""Requests and a pool without an engine, as /v1/kv tells of them: tokens are words, and which heads
keep them is drawn from the chunk's number.
"""

from __future__ import annotations

import asyncio
import base64
import re
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

LAYERS, KV_HEADS, CHUNK_TOKENS, PAGE_TOKENS = 6, 4, 64, 16
TOKEN_BYTES = 512
RAW_TAIL, SEALED, SHARED, KEPT_FOR_NOBODY = 2, 3, 4, 5
RETENTIONS = (1.0, 0.5, 0.3)
DEFAULT_RETENTION = 0.5
DRAFT_RETENTION = 0.3

Json = dict[str, Any]
Way = tuple[float, str | None]
# The ways to keep entries that are served: (ρ, scorer), the default among them.
WAYS: tuple[Way, ...] = ((1.0, None), (0.5, "keydiff"), (0.3, "keydiff"))


def tokens_of(text: str) -> list[str]:
    return re.findall(r"\s*\S+|\s+$", text)


def encode(values: np.ndarray) -> str:
    return base64.b64encode(values.tobytes()).decode()


def budgets_of(retention: float) -> list[list[int]]:
    """Entries that each head keeps of a chunk: early layers more, and heads unequally."""
    shares = np.linspace(1.4, 0.6, LAYERS)[:, None] * np.linspace(0.7, 1.3, KV_HEADS)[None, :]
    kept = CHUNK_TOKENS * np.minimum(1.0, retention * shares if retention < 1 else 1.0 + 0 * shares)
    return [[int(head) for head in layer] for layer in np.maximum(kept.round(), 1)]


def kept_of(chunk: int, retention: float) -> np.ndarray:
    """[layers, heads, tokens] of bool, with the budgets' number of tokens for each head."""
    draw = np.random.default_rng(chunk)
    kept = np.zeros((LAYERS, KV_HEADS, CHUNK_TOKENS), bool)
    for layer, heads in enumerate(budgets_of(retention)):
        for head, budget in enumerate(heads):
            kept[layer, head, draw.permutation(CHUNK_TOKENS)[:budget]] = True
    return kept


# What a prompt with the word "diverged" has lost.
LOST: Json = {
    "reason": "diverged",
    "lost_tokens": 61204,
    "at_token": 41,
    "before": "Today is",
    "earlier": " Monday. <b>Help</b> with",
    "now": " Tuesday. <b>Help</b> with",
}


@dataclass
class FakeRequest:
    """One answer; `tokens` are those of the prompt and the answer so far. `host_chunks` lie in host
    memory, the others on the device.
    """

    id: str
    request_id: str
    retention: float
    tokens: list[str]
    prompt_tokens: int
    cached_tokens: int
    number: int
    scorer: str | None = None
    state: str = "running"
    pages: list[int] = field(default_factory=list)
    drafted: Json = field(default_factory=dict)
    reads_drafts: bool = False
    host_chunks: set[int] = field(default_factory=set)

    @property
    def chunks(self) -> int:
        return len(self.tokens) // CHUNK_TOKENS

    @property
    def output_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def broken(self) -> bool:
        """Whether the connection of the answer breaks."""
        return "broken" in self.words

    @property
    def words(self) -> list[str]:
        """The words of the prompt."""
        return "".join(self.tokens[: self.prompt_tokens]).split()

    @property
    def reuse(self) -> Json:
        """Why its prompt was not reused."""
        return LOST if "diverged" in self.words else {"reason": "none", "lost_tokens": 0}

    @property
    def drafts_recorded(self) -> bool:
        """Notes of what drafts read come after the chunks."""
        return self.reads_drafts and self.state == "ended"

    def held_bytes(self) -> int:
        raw = len(self.tokens) % CHUNK_TOKENS
        chunk = sum(map(sum, budgets_of(self.retention))) / (LAYERS * KV_HEADS)
        return int((self.chunks * chunk + raw) * TOKEN_BYTES)

    def usage(self) -> Json:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.output_tokens,
            "total_tokens": len(self.tokens),
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "kv_bytes": self.held_bytes(),
            "kv_bytes_uncompressed": len(self.tokens) * TOKEN_BYTES,
            "completion_tokens_details": self.drafted,
        }

    def event(self) -> Json:
        return {
            "id": self.id,
            "request_id": self.request_id,
            "index": 0,
            "conversation": self.number,
            "state": self.state,
            "tokens": len(self.tokens),
            "sealed_chunks": self.chunks,
            "cached_tokens": self.cached_tokens,
            "kv_bytes": self.held_bytes(),
            "kv_bytes_uncompressed": len(self.tokens) * TOKEN_BYTES,
            "accepted": 0,
            "rejected": 0,
        }

    def describe(self, tokens_from: int) -> Json:
        chunks = [
            {
                "index": index,
                "begin": index * CHUNK_TOKENS,
                "end": (index + 1) * CHUNK_TOKENS,
                "recorded": True,
                "drafts_recorded": self.drafts_recorded,
                "shared_by": 1,
                "in": "host" if index in self.host_chunks else "device",
            }
            for index in range(self.chunks)
        ]
        shown = self.tokens[tokens_from:]
        return {
            **self.event(),
            "kv_retention": self.retention,
            "scorer": self.scorer,
            "tokens": [{"id": len(text), "text": text} for text in shown],
            "prompt_tokens": self.prompt_tokens,
            "reuse": self.reuse,
            "computed_tokens": self.prompt_tokens - self.cached_tokens,
            "chunks": chunks,
            "raw": {"begin": self.chunks * CHUNK_TOKENS, "end": len(self.tokens)},
            "drafted": None,
            "times": {"queued": 0.0, "admitted": 0.0, "first_token": 0.1, "ended": None},
            "output_tokens": self.output_tokens,
        }


class FakeCache:
    """All requests, the pool, and those who watch."""

    def __init__(self, pages: int, ways: tuple[Way, ...] = WAYS, *, drafts: bool = False) -> None:
        self.pages, self.ways, self.drafts = pages, ways, drafts
        self.requests: dict[str, FakeRequest] = {}
        self.watchers: set[asyncio.Queue[tuple[str, Json]]] = set()
        self.states = np.zeros(pages, np.uint8)
        self.promised = 5
        self.owners = np.zeros(pages, np.uint16)
        self.steps: list[Json] = []
        self.begun_s = time.monotonic()

    def model(self, name: str) -> Json:
        return {
            "model": name,
            "layers": LAYERS,
            "kv_heads": KV_HEADS,
            "chunk_tokens": CHUNK_TOKENS,
            "page_tokens": PAGE_TOKENS,
            "page_bytes": PAGE_TOKENS * TOKEN_BYTES,
            "kv_token_bytes": TOKEN_BYTES,
            "full_layers": list(range(LAYERS)),
            "windows": [None] * LAYERS,
            "retentions": [
                {
                    "kv_retention": ratio,
                    "scorer": scorer,
                    "budgets": budgets_of(ratio),
                    "drafted": self.drafts and ratio == 1,
                    "default": (ratio, scorer) == (DEFAULT_RETENTION, "keydiff"),
                }
                for ratio, scorer in self.ways
            ],
            "speculation": {"method": "compressed_kv", "num_speculative_tokens": 8}
            if self.drafts
            else None,
            "pages_total": self.pages,
            "host_pages_total": 50,
            "recorded": True,
        }

    def pool(self) -> Json:
        known = [
            {
                "number": each.number,
                "id": each.id,
                "request_id": each.request_id,
                "tokens": len(each.tokens),
            }
            for each in self.requests.values()
        ]
        return {
            "pages_total": self.pages,
            "states": encode(self.states),
            "owners": encode(self.owners),
            "host_used": 3,
            "host_total": 50,
            "promised": self.promised,
            "conversations": known,
        }

    def begin(
        self,
        id: str,
        request_id: str,
        prompt: list[str],
        retention: float,
        scorer: str | None = None,
    ) -> FakeRequest:
        scorer = scorer or next(own for ratio, own in self.ways if ratio == retention)
        shared = max(
            (self._count_shared(prompt, each, retention) for each in self.requests.values()),
            default=0,
        )
        number = len(self.requests) + 1
        request = FakeRequest(
            id, request_id, retention, prompt, len(prompt), shared, number, scorer
        )
        request.reads_drafts = self.drafts and retention == 1
        self.requests[id] = request
        self.step(request, chunks=len(prompt) // CHUNK_TOKENS)
        return request

    @staticmethod
    def _count_shared(prompt: list[str], other: FakeRequest, retention: float) -> int:
        if other.retention != retention:
            return 0
        both = zip(prompt, other.tokens, strict=False)
        same = next((at for at, (one, two) in enumerate(both) if one != two), None)
        same = min(len(prompt), len(other.tokens)) if same is None else same
        return same // CHUNK_TOKENS * CHUNK_TOKENS

    def step(self, request: FakeRequest, chunks: int = 0) -> None:
        """Tell the watchers of one step of `request` alone."""
        step = {
            "n": len(self.steps),
            "at": time.monotonic() - self.begun_s,
            "seconds": 0.004 + 0.01 * chunks,
            "decode_rows": 1,
            "decode_tokens": 1,
            "chunks": chunks,
            "tail_tokens": 0 if chunks == 0 else 20,
            "moves": 0,
            "drafted": 0,
            "accepted": 0,
        }
        self.steps.append(step)
        self.tell("step", step)
        self.tell(
            "pool",
            {"changes": self._take_pages(request), "host_used": 3, "promised": self.promised},
        )
        self.tell("request", request.event())

    def _take_pages(self, request: FakeRequest) -> list[list[int]]:
        needed = -(-len(request.tokens) // PAGE_TOKENS) - len(request.pages)
        free = np.flatnonzero(self.states == 0)[: max(0, needed)].tolist()
        for page in free:
            self.states[page], self.owners[page] = RAW_TAIL, request.number
        sealed = request.pages[-8:]
        self.states[sealed] = SEALED
        request.pages += free
        return [[page, int(self.states[page]), request.number] for page in (*sealed, *free)]

    def end(self, request: FakeRequest) -> None:
        request.state = "ended"
        self.states[request.pages] = KEPT_FOR_NOBODY
        changes = [[page, KEPT_FOR_NOBODY, request.number] for page in request.pages]
        self.tell("pool", {"changes": changes, "host_used": 3, "promised": 0})
        self.tell("request", request.event())

    def tell(self, event: str, data: Json) -> None:
        for watcher in self.watchers:
            watcher.put_nowait((event, data))
