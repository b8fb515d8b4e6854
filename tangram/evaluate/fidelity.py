"""How far what a model expects of real text changes with the cache: no questions, no grading, every token counts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tangram.config import EngineConfig
from tangram.engine.forced import ForcedText
from tangram.errors import ConfigError
from tangram.model.load import LoadedModel
from tangram.pilots import topics

TAIL_TOKENS = 128


@dataclass(frozen=True)
class Fidelity:
    """Of one passage's last tokens, means over them.

    `divergence`: the Kullback–Leibler divergence, in nats, of what is expected from what the full cache expects.
    `agreement`: how often the likeliest token is the same. `surprise` and `full_surprise`: the negative log-likelihood
    of the text itself, in nats a token; `exp` of its mean over passages is the perplexity.
    """

    divergence: float
    agreement: float
    surprise: float
    full_surprise: float

    @classmethod
    def of(cls, full: Tensor, found: Tensor, tokens: Sequence[int]) -> Fidelity:
        """Of logits [n, V] behind each of the last n of `tokens`, with everything in the cache and as found."""
        full, found = full.float().log_softmax(-1), found.float().log_softmax(-1)
        following = torch.as_tensor(tokens[len(tokens) - len(full) + 1 :], device=full.device)[:, None]
        return cls(
            divergence=float((full.exp() * (full - found)).sum(-1).mean()),
            agreement=float((full.argmax(-1) == found.argmax(-1)).float().mean()),
            surprise=-float(found[:-1].gather(1, following).mean()),
            full_surprise=-float(full[:-1].gather(1, following).mean()),
        )


def passages(
    encode: Callable[[str], Sequence[int]], context_tokens: int, count: int, seed: int = 0,
    texts: Sequence[str] | None = None,
) -> list[list[int]]:  # fmt: skip
    """`count` pieces of `context_tokens` + `TAIL_TOKENS` tokens of `texts`, by default of the topics of Python's help.

    Raises `ConfigError` if the texts have fewer.
    """
    rng = random.Random(f"fidelity/{seed}")
    length, pieces = context_tokens + TAIL_TOKENS, list[list[int]]()
    pool = list[int]()
    for text in topics(rng) if texts is None else texts:
        pool += encode(text)
        while len(pool) >= length and len(pieces) < count:
            pieces.append(pool[:length])
            pool = pool[length:]
        if len(pieces) == count:
            return pieces
    raise ConfigError(
        f"samples is {count}, the texts hold {len(pieces)} passages of {context_tokens} + {TAIL_TOKENS} tokens: ask "
        f"for fewer, for shorter contexts, or bring more text"
    )


def expected(config: EngineConfig, loaded: LoadedModel, pieces: Iterable[Sequence[int]]) -> Iterator[Tensor]:
    """By passage, the logits float32 [`TAIL_TOKENS`, V] behind each token of its tail, its context sealed.

    The context must be whole chunks, and the tail less than one.
    """
    forced = ForcedText(config, loaded)
    for tokens in pieces:
        logits = forced.logits(tokens)
        if len(logits) != TAIL_TOKENS:
            raise ConfigError(
                f"context_tokens leaves {len(logits)} tokens unsealed with chunk_tokens {config.chunk_tokens}, it must "
                f"leave {TAIL_TOKENS}: make it a multiple of chunk_tokens, and those more than {TAIL_TOKENS}"
            )
        yield logits
