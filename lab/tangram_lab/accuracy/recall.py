"""Recall of evidence: the share of an answer's evidence that a method keeps, in KV entries.

It is computed from scores alone, without any answer. Each chunk sees its past uncompressed, as in
calibration, so from the second chunk on it differs a little from what an engine keeps. A token has
an entry for each full-attention layer and KV head. Layers with a window drop nothing in it.

Shape letters: `L` full-attention layers · `H` KV heads · `C` tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tangram.cache.layout import Layout
from tangram.calibrate.measure import Scores, ScoreSource
from tangram.compress.profile import SINK_TOKENS, Profile
from tangram.compress.scorers import default_scope
from tangram.compress.select import choose_entries, dynamic_choice, protect
from tangram.types import Float64, Geometry
from tangram_lab.accuracy.methods import Method
from tangram_lab.accuracy.sample_prompts import ChatCodec, SuitePrompts, evidence_tokens

# The entries that stay, bool [L, H, C], by scores float32 [L, H, C] and the chunk's start.
Rule = Callable[[Tensor, int], Tensor]


def everything(scores: Tensor, start: int) -> Tensor:
    """The `Rule` of methods that keep everything."""
    return torch.ones_like(scores, dtype=torch.bool)


def make_budget_rule(profile: Profile, geometry: Geometry) -> Rule:
    """Every head keeps its number of entries of each chunk, as in an engine with `profile`."""
    layout = Layout.build(
        geometry,
        chunk_tokens=profile.chunk_tokens,
        page_tokens=profile.page_tokens,
        heads_per_page=profile.heads_per_page,
        max_tokens=geometry.max_positions,
        groups=profile.groups,
        sealed_pages=profile.sealed_pages,
    )
    counts = torch.from_numpy(layout.head_kept_tokens[list(geometry.full_layers)].ravel())

    def rule(scores: Tensor, start: int) -> Tensor:
        forced = protect(scores.flatten(0, 1), start, profile.sink_tokens, profile.window_tokens)
        return choose_entries(forced, counts).reshape(scores.shape)

    return rule


def competing(method: Method) -> Rule:
    """Heads compete for ρ of each chunk in the scope of `method`, dynamic or one-shot.

    Raises `ValueError` for a method that has no scorer.
    """
    if method.scorer is None or method.chunk_tokens is None:
        raise ValueError(f"method {method.title} has no scores")
    scope, window = method.scope or default_scope(method.scorer), method.chunk_tokens // 64

    def rule(scores: Tensor, start: int) -> Tensor:
        return dynamic_choice(scores, method.kv_retention, scope, SINK_TOKENS, window, start)

    return rule


def compute_kept_shares(chunks: Iterable[Scores], rule: Rule, tokens: int) -> Float64:
    """[tokens]: the share of the L · H entries of each token that `rule` keeps.

    `chunks` are the scores [L, H, C] of a text's full chunks, first chunk first. Tokens after the
    last full chunk stay raw: 1.
    """
    shares, start = np.ones(tokens), 0
    for scores in chunks:
        end = start + scores.shape[-1]
        shares[start:end] = rule(torch.from_numpy(scores), start).double().mean(dim=(0, 1)).numpy()
        start = end
    return shares


def recall(shares: Float64, pieces: Sequence[range]) -> float | None:
    """The mean of `shares` over the tokens of `pieces`, each token once; None without pieces."""
    tokens = sorted({token for piece in pieces for token in piece})
    return float(shares[tokens].mean()) if tokens else None


@dataclass
class Contexts:
    """The scores of the contexts of suites, and the places of their evidence.

    Only the latest scores are kept, in host memory: 4 · L · H bytes a token, 1.5 MB for a context
    of 4,096 tokens of the embedded model. They belong to one scorer, chunk size and digest of the
    prompts.
    """

    latest: tuple[str, int, str] | None = None
    scores: Sequence[Sequence[Scores]] = ()
    places: dict[str, list[tuple[tuple[range, ...], ...]]] = field(default_factory=dict)

    def score(
        self, method: Method, prompts: SuitePrompts, source_of: Callable[[str, int], ScoreSource]
    ) -> Sequence[Sequence[Scores]]:
        """By sample, the scores [L, H, C] of its context's full chunks; empty without a scorer."""
        if method.scorer is None or method.chunk_tokens is None:
            return [()] * len(prompts.samples)
        wanted = (method.scorer, method.chunk_tokens, prompts.sha256)
        if wanted != self.latest:
            self.latest, self.scores = None, ()
            source = source_of(method.scorer, method.chunk_tokens)
            self.scores = [
                list(source(one.prompts[0][: one.shared_tokens])) for one in prompts.samples
            ]
            self.latest = wanted
        return self.scores

    def evidence(
        self, prompts: SuitePrompts, codec: ChatCodec
    ) -> list[tuple[tuple[range, ...], ...]]:
        """By sample and question, the tokens of each piece; computed once."""
        if prompts.sha256 not in self.places:
            self.places[prompts.sha256] = [
                evidence_tokens(sample, codec) for sample in prompts.samples
            ]
        return self.places[prompts.sha256]
