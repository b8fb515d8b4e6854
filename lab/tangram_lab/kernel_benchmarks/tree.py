"""Prefix trees in PAT's written form, `1,10_4096,416`: nodes per level `_` tokens per node of that
level.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tangram.errors import ConfigError
from tangram.types import Int64

# The 20 configurations of PAT's kernel evaluation (arXiv 2511.22333); the last two share nothing.
CONFIGS = (
    "1,10_4096,416",
    "1,256_256,32",
    "1,1024_2048,32",
    "1,2,64_1024,256,256",
    "1,4,256_32,256,32",
    "1,8,512_32,512,256",
    "1,8,512_32,2048,256",
    "1,8,512_512,512,256",
    "1,4,8,256_32,256,256,32",
    "1,4,16,512_1024,256,128,32",
    "1,4,16,64,256,1024_256,32,256,64,32,256",
    "1,16,32,64,128,1024_256,128,64,32,32,32",
    "1,16,32,64,256,1024_256,128,64,32,32,32",
    "1,8,16,32,64,128,1024_256,128,64,32,32,32,32",
    "1,8,16,32,64,256,1024_256,128,64,32,32,32,32",
    "2,8,16,256_256,256,32,32",
    "4,16,256,512_512,32,128,32",
    "8,16,32,256_512,512,256,32",
    "256_1024",
    "256_4096",
)
HEADS = ("64/8", "32/8", "16/8", "32/32")
PAGE_TOKENS = 32
QUICK_CONFIGS = (
    "1,10_4096,416",
    "1,256_256,32",
    "1,1024_2048,32",
    "1,8,512_512,512,256",
    "1,4,16,512_1024,256,128,32",
    "1,16,32,64,128,1024_256,128,64,32,32,32",
    "8,16,32,256_512,512,256,32",
    "256_1024",
)


@dataclass(frozen=True)
class Tree:
    """`nodes[i]` nodes at level i, each of `tokens[i]` tokens.

    Leaves are requests; several roots are allowed. Children are distributed evenly: the parent of
    node j of level i + 1 is node j·n_i // n_{i+1} of level i.
    """

    nodes: tuple[int, ...]
    tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.nodes) != len(self.tokens) or not self.nodes:
            raise ConfigError(f"tree {self}: give as many token counts as levels, at least one")
        if any(number < 1 for number in self.nodes + self.tokens) or list(self.nodes) != sorted(
            self.nodes
        ):
            raise ConfigError(
                f"tree {self}: counts must be positive and nodes per level must not fall"
            )

    @classmethod
    def parse(cls, text: str) -> Tree:
        """From the written form. Raises `ConfigError`."""
        try:
            nodes, tokens = (
                tuple(int(number) for number in part.split(",")) for part in text.split("_")
            )
        except ValueError as error:
            raise ConfigError(f"tree is {text!r}, it must read like 1,10_4096,416") from error
        return cls(nodes, tokens)

    def __str__(self) -> str:
        return "_".join(",".join(map(str, numbers)) for numbers in (self.nodes, self.tokens))

    @property
    def leaves(self) -> int:
        """Requests."""
        return self.nodes[-1]

    @property
    def shared(self) -> bool:
        """Whether any node serves more than one request."""
        return self.leaves > self.nodes[0]

    @cached_property
    def path(self) -> Int64:
        """[leaves, levels]: the node of each level above (or at) each leaf."""
        columns = [np.arange(self.leaves, dtype=np.int64)]
        for above, below in zip(self.nodes[-2::-1], self.nodes[:0:-1], strict=True):
            columns.append(columns[-1] * above // below)
        return np.stack(columns[::-1], axis=1)

    def shrink(self, *, leaves: int, tokens: int) -> Tree:
        """A small tree of as many levels, for tests, with at most `leaves` and `tokens` a node."""
        return Tree(
            tuple(min(n, leaves) for n in self.nodes), tuple(min(t, tokens) for t in self.tokens)
        )
