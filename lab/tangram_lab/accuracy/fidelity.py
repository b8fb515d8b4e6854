"""How far a cache changes the model's next-token distributions on real text.

There are no questions and no grading: every token counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from tangram.config import EngineConfig
from tangram.errors import ConfigError
from tangram.model.load import LoadedModel
from tangram_lab.accuracy.forced import ForcedText
from tangram_lab.accuracy.passages import TAIL_TOKENS
from tangram_lab.accuracy.results import Fidelity


def fidelity(full: Tensor, found: Tensor, tokens: Sequence[int]) -> Fidelity:
    """Compare logits [n, V] at each of the last n of `tokens`: with full KV, and as measured."""
    full, found = full.float().log_softmax(-1), found.float().log_softmax(-1)
    following = torch.as_tensor(tokens[len(tokens) - len(full) + 1 :], device=full.device)[:, None]
    return Fidelity(
        divergence=float((full.exp() * (full - found)).sum(-1).mean()),
        agreement=float((full.argmax(-1) == found.argmax(-1)).float().mean()),
        surprise=-float(found[:-1].gather(1, following).mean()),
        full_surprise=-float(full[:-1].gather(1, following).mean()),
    )


def compute_expected(
    config: EngineConfig, loaded: LoadedModel, pieces: Iterable[Sequence[int]]
) -> Iterator[Tensor]:
    """By passage, the logits float32 [`TAIL_TOKENS`, V] at each token of its tail.

    The context is sealed. It must be whole chunks, and the tail less than one.
    """
    forced = ForcedText(config, loaded)
    for tokens in pieces:
        logits = forced.logits(tokens)
        if len(logits) != TAIL_TOKENS:
            raise ConfigError(
                f"context_tokens leaves {len(logits)} tokens unsealed with chunk_tokens "
                f"{config.chunk_tokens}, it must leave {TAIL_TOKENS}: make it a multiple of "
                f"chunk_tokens, and those more than {TAIL_TOKENS}"
            )
        yield logits
