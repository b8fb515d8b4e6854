"""What stays of a chunk, and what its tokens must have noted for that when it ends."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tangram.compress.profile import Profile
from tangram.compress.scorers import SCORERS, ChunkView, Scorer, make_scorer
from tangram.kernels.transfer import upload
from tangram.model.sealing import ChunkRanking
from tangram_vllm.slab import NoteForm, Slab


class NewTokens(NamedTuple):
    """What a layer has of the T tokens of a step: `q` [T, Q, D], `k` and `v` [T, H, D].

    `hidden` [T, hidden] is the input of its attention module, where the scorer reads that.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    hidden: Tensor | None = None


class Keeping(NamedTuple):
    """What stays of a chunk: the best by `scorer`, behind tokens that always stay.

    These are the first `sinks` of a sequence and the last `window` of a chunk.
    """

    scorer: Scorer
    sinks: int
    window: int

    @classmethod
    def of(cls, profile: Profile, gate: Path | None) -> Keeping:
        """That of `profile`, whose scorer may need a `gate`: else that which ships.

        Raises `ProfileError` if its scorer had other parameters.
        """
        scorer = make_scorer(profile.scorer.name, gate=gate, model=profile.model)
        scorer.check_model(profile.model)
        profile.check_options(
            scorer=scorer.name,
            scope=profile.scope,
            kv_retention=profile.kv_retention,
            chunk_tokens=profile.chunk_tokens,
            parameters=scorer.parameters(),
        )
        return cls(scorer, profile.sink_tokens, profile.window_tokens)

    def note(self, layer: int, new: NewTokens, scaling: float) -> Tensor:
        """[T, elements]: of each token its score, if that needs no other token, or its queries."""
        if not self.scorer.by_token:
            return new.q.flatten(1)
        queries, keys, values = (x.transpose(0, 1) for x in new[:3])
        tokens = ChunkView(queries, keys, values, 0, layer, scaling, hidden=new.hidden)
        return self.scorer.score(tokens).T.contiguous().view(new.q.dtype)

    @property
    def reads_entries(self) -> bool:
        """Whether the scorer reads keys and values of the chunk, and nothing else."""
        return self.scorer.count_queries(1) == 0 and not self.scorer.needs

    def score(self, chunk: ChunkView, notes: Tensor | None) -> Tensor:
        """[H, C]: the scores of `chunk`, by `notes` [n, elements] of its last n tokens.

        None of a scorer that `reads_entries`. Else `chunk` needs no queries.
        """
        if notes is not None and self.scorer.by_token:
            return notes.view(torch.float32).T
        if notes is not None:
            queries = torch.unflatten(notes, 1, (-1, chunk.keys.shape[2])).transpose(0, 1)
            chunk = replace(chunk, queries=queries)
        return self.scorer.score(chunk)

    def rank(self, scores: Tensor) -> ChunkRanking:
        """The order of the entries of N chunks with `scores` [N, H, C]."""
        return ChunkRanking(scores, self.sinks, self.window)


class NotePlaces(NamedTuple):
    """Where tokens are noted: `places` [L, n, vectors] among the `vectors` of a pool."""

    vectors: Tensor
    places: Tensor

    def read(self, layer: int) -> Tensor:
        """[n, elements]: the notes of one layer."""
        return self.vectors[self.places[layer]].flatten(1)

    def write(self, layer: int, notes: Tensor) -> None:
        """Store `notes` [n, elements] of one layer."""
        places = self.places[layer]
        self.vectors[places] = torch.unflatten(notes, 1, (places.shape[1], -1))


class NoteStore:
    """The notes of raw tokens in the `entries` of a pool."""

    def __init__(self, slab: Slab, form: NoteForm, entries: Tensor) -> None:
        self._slab, self._first = slab, form.first
        self._vectors = entries.view(-1, slab.note_vector)

    def find(self, blocks: Tensor, begin: int, end: int) -> NotePlaces:
        """Those of the noted ones of tokens [begin, end) of a chunk with raw `blocks`."""
        slab, device = self._slab, self._vectors.device
        numbers, vectors = slab.note_numbers(
            np.arange(max(begin, self._first), max(end, self._first))
        )
        block, page = np.divmod(numbers, slab.pages)
        inside = upload(page * slab.page_vectors + vectors, device)
        first = blocks.long() * (slab.pages * slab.page_vectors)
        return NotePlaces(self._vectors, first[upload(block, device)] + inside)


def find_note_form(profile: Profile | None, element_bytes: int) -> NoteForm | None:
    """What raw tokens must have noted for the scorer of `profile`; None if nothing.

    The last token of a chunk always comes with its end.
    """
    if profile is None:
        return None
    model, tokens = profile.model, profile.chunk_tokens
    if SCORERS[profile.scorer.name].by_token:
        return NoteForm(0, model.kv_heads * torch.float32.itemsize // element_bytes)
    read = min(make_scorer(profile.scorer.name).count_queries(tokens), tokens)
    return NoteForm(tokens - read, model.query_heads * model.head_dim) if read > 1 else None
