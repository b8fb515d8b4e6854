"""Long real text in pieces of equal length, on which fidelity is measured."""

from __future__ import annotations

import hashlib
import itertools
import random
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tangram.calibrate.texts import topics
from tangram.errors import ConfigError
from tangram.foreign_files import read_text
from tangram_lab.accuracy.sample_prompts import Alignment, ChatCodec
from tangram_lab.accuracy.suites import MIN_CONTEXT_TOKENS, SAMPLES

SUITE = "fidelity"
TAIL_TOKENS = 128
# Tables, or not its own
_LEFT_OUT = frozenset({"encodings", "pydoc_data", "site-packages", "dist-packages", "test"})


@dataclass(frozen=True)
class Passages:
    """Pieces of one length in tokens, and a digest (SHA-256, hex) of them all."""

    pieces: tuple[tuple[int, ...], ...]
    sha256: str
    suite: str = SUITE

    @property
    def longest_tokens(self) -> int:
        """The length of each."""
        return len(self.pieces[0])

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.pieces)


@dataclass(frozen=True)
class RealText:
    """`samples` passages of `context_tokens`, each with `TAIL_TOKENS` more that are measured.

    They are cut from the UTF-8 text of `path`. Without it they come from sources of Python's
    standard library that calibration does not read. `samples` None is `SAMPLES`, or what the file
    gives if that is less.
    """

    samples: int | None
    context_tokens: int
    seed: int = 0
    path: Path | None = None
    suite: str = SUITE

    def prompts(self, codec: ChatCodec, alignment: Alignment | None) -> Passages:
        """Cut the passages; contexts are always whole chunks.

        Raises `ConfigError` naming what cannot be met.
        """
        if alignment is None:
            raise ConfigError(
                f"suites has {SUITE}, whose contexts are whole chunks: that needs align"
            )
        if self.context_tokens < MIN_CONTEXT_TOKENS or self.context_tokens % alignment.tokens:
            raise ConfigError(
                f"context_tokens is {self.context_tokens}, for {SUITE} it must be at least "
                f"{MIN_CONTEXT_TOKENS} and a multiple of the largest chunk, {alignment.tokens}"
            )
        texts = _sources(self.seed) if self.path is None else [_read(self.path)]
        found = passages(codec.encode, self.context_tokens, self.samples, texts=texts)
        content = repr((self.context_tokens, found))
        return Passages(
            tuple(tuple(piece) for piece in found), hashlib.sha256(content.encode()).hexdigest()
        )


def passages(
    encode: Callable[[str], Sequence[int]],
    context_tokens: int,
    count: int | None,
    *,
    texts: Iterable[str],
) -> list[list[int]]:
    """`count` pieces of `context_tokens` + `TAIL_TOKENS` tokens of `texts`, one after the other.

    `count` None is `SAMPLES`, or all if there are fewer. Raises `ConfigError` if the texts hold
    fewer than asked for.
    """
    if count is not None and count < 1:
        raise ConfigError(f"samples is {count}, it must be at least 1")
    wanted = SAMPLES if count is None else count
    length, pieces, pool = context_tokens + TAIL_TOKENS, list[list[int]](), list[int]()
    for text in texts:
        pool += encode(text)
        while len(pool) >= length and len(pieces) < wanted:
            pieces.append(pool[:length])
            pool = pool[length:]
        if len(pieces) == wanted:
            break
    if len(pieces) < (1 if count is None else count):
        raise ConfigError(
            f"samples is {wanted}, the texts hold {len(pieces)} passages of {context_tokens} + "
            f"{TAIL_TOKENS} tokens: ask for fewer, for shorter contexts, or bring more text"
        )
    return pieces


def _sources(seed: int) -> Iterator[str]:
    """Modules in packages of the standard library, shuffled, then the topics of `help()`.

    Calibration texts read others.
    """
    rng, root = random.Random(f"{SUITE}/{seed}"), Path(sysconfig.get_path("stdlib"))
    paths = sorted(path for path in root.glob("*/*.py") if path.parent.name not in _LEFT_OUT)
    rng.shuffle(paths)
    sources = (path.read_text(encoding="utf-8", errors="replace") for path in paths)
    return itertools.chain(sources, itertools.islice(topics(rng), 50))


def _read(path: Path) -> str:
    try:
        return read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"text is {path}, which cannot be read as UTF-8 ({error}): name a file of text"
        ) from error
