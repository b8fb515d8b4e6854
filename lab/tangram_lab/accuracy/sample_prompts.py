"""Samples to token ids. Prompts of one context share a prefix, which can be aligned to chunks."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from tangram.errors import ConfigError
from tangram_lab.accuracy.sample import Sample
from tangram_lab.accuracy.suites import MIN_CONTEXT_TOKENS, SUITES

_PROBES = ("A", "7")  # texts that share no token
_BREAKS = ("A", ".")  # after any letter, digit or sign, one of them begins a token of its own
_MARGIN_TOKENS = 4  # the context's first token may become two after the template


class ChatCodec(Protocol):
    """A tokenizer with a chat template; `tangram.engine.text.codec.TextCodec` is one."""

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """The tokens of a conversation up to the start of the assistant's answer."""
        ...

    def encode(self, text: str) -> tuple[int, ...]:
        """The tokens of a text, with the special tokens that the model expects."""
        ...


@dataclass(frozen=True)
class Alignment:
    """Pad the shared prefix of a sample with `filler_token` to a multiple of `tokens`."""

    tokens: int
    filler_token: int


@dataclass(frozen=True)
class SamplePrompts:
    """`prompts[i]` asks question i of `sample`.

    All begin with the same `shared_tokens`: template, filler, context.
    """

    sample: Sample
    prompts: tuple[tuple[int, ...], ...]
    shared_tokens: int
    filler_tokens: int

    @property
    def longest_tokens(self) -> int:
        """The longest prompt with its reply."""
        questions = zip(self.prompts, self.sample.questions, strict=True)
        return max(len(prompt) + question.max_tokens for prompt, question in questions)


@dataclass(frozen=True)
class SuitePrompts:
    """All prompts of one suite, and a digest (SHA-256, hex) of them."""

    suite: str
    samples: tuple[SamplePrompts, ...]
    sha256: str

    @property
    def longest_tokens(self) -> int:
        """The longest prompt with its reply."""
        return max(sample.longest_tokens for sample in self.samples)

    @property
    def count(self) -> int:
        """The number of questions."""
        return sum(len(sample.prompts) for sample in self.samples)


@dataclass(frozen=True)
class Questions:
    """`samples` samples of `suite` over contexts of `context_tokens`, template included.

    `samples` None is the suite's own number. `tasks` None are all tasks of the suite.
    `max_questions` None allows all questions of a context. `path` is for suites that are read from
    files.
    """

    suite: str
    tasks: tuple[str, ...] | None
    samples: int | None
    context_tokens: int
    seed: int = 0
    max_questions: int | None = None
    path: Path | None = None

    def prompts(self, codec: ChatCodec, alignment: Alignment | None) -> SuitePrompts:
        """Write the samples and their prompts. Raises `ConfigError` naming what cannot be met."""
        head = _common(*(_tokens(codec, probe) for probe in _PROBES))
        budget_tokens = self.context_tokens - head - _MARGIN_TOKENS
        if budget_tokens < MIN_CONTEXT_TOKENS:
            raise ConfigError(
                f"context_tokens is {self.context_tokens}, of which the chat template takes "
                f"{head}: it must be at least {MIN_CONTEXT_TOKENS + head + _MARGIN_TOKENS}"
            )
        special = len(codec.encode(""))
        samples = SUITES[self.suite](
            lambda text: len(codec.encode(text)) - special,
            budget_tokens,
            self.samples,
            self.seed,
            tasks=self.tasks,
            max_questions=self.max_questions,
            path=self.path,
        )
        made = tuple(prompts_of(sample, codec, alignment) for sample in samples)
        content = [
            (one.prompts, [question.max_tokens for question in one.sample.questions])
            for one in made
        ]
        return SuitePrompts(self.suite, made, hashlib.sha256(repr(content).encode()).hexdigest())


def prompts_of(sample: Sample, codec: ChatCodec, alignment: Alignment | None) -> SamplePrompts:
    """The prompts of a sample, each one user message of the context and a question.

    With `alignment` filler stands between the template's beginning and the context, so that the
    context ends where a chunk does. Without it the prompt has no filler, and up to C − 1 tokens of
    the context stay raw.
    """
    asked = [_tokens(codec, sample.context + question.text) for question in sample.questions]
    shared = _common(*asked, *(_tokens(codec, sample.context + probe) for probe in _PROBES))
    if alignment is None:
        return SamplePrompts(sample, tuple(asked), shared, 0)
    head = _common(asked[0], *(_tokens(codec, probe) for probe in _PROBES))
    filler = (alignment.filler_token,) * (-shared % alignment.tokens)
    filled = tuple((*tokens[:head], *filler, *tokens[head:]) for tokens in asked)
    return SamplePrompts(sample, filled, shared + len(filler), len(filler))


def evidence_tokens(asked: SamplePrompts, codec: ChatCodec) -> tuple[tuple[range, ...], ...]:
    """The place of each question's evidence in the prompts: by question, the tokens of each piece.

    The first place of a piece in the context counts. A token that begins before a piece and ends in
    it belongs to it; a token that ends after it does not. Raises `ValueError` if a piece does not
    stand in the context.
    """
    context, questions = asked.sample.context, asked.sample.questions
    text = context + questions[0].text
    tokens = _tokens(codec, text)

    @cache
    def before(place: int) -> int:
        """The number of tokens that end at this character or before it."""
        # A probe differs from the next character. It may join the last token, so the longer
        # beginning counts.
        probes = (probe for probe in _BREAKS if probe != text[place : place + 1])
        ended = max(_common(tokens, _tokens(codec, text[:place] + probe)) for probe in probes)
        return min(asked.filler_tokens + ended, asked.shared_tokens)

    def lies(piece: str) -> range:
        begin = context.index(piece)
        return range(before(begin), before(begin + len(piece)))

    return tuple(tuple(lies(piece) for piece in question.evidence) for question in questions)


def filler_token(codec: ChatCodec) -> int:
    """The token of a line break."""
    special = codec.encode("")
    return [token for token in codec.encode("\n") if token not in special][-1]


def parse_suites(text: str, undivided: Sequence[str] = ()) -> dict[str, tuple[str, ...] | None]:
    """Tasks by suite; None is all of its tasks.

    `text` has comma-separated names of suites, or `suite/task` for one task. `undivided` are suites
    that have no tasks. Raises `ConfigError` for an unknown suite, or for a task of an undivided
    one. The suite itself checks the names of its tasks.
    """
    tasks: dict[str, tuple[str, ...] | None] = {}
    for entry in (entry.strip() for entry in text.split(",")):
        suite, slash, task = entry.partition("/")
        if suite not in SUITES and suite not in undivided:
            known = ", ".join([*SUITES, *undivided])
            raise ConfigError(f"suites has {suite!r}, known are {known}: name one, or SUITE/TASK")
        if suite in undivided and slash:
            raise ConfigError(f"suites has {entry!r}, but {suite} has no tasks: ask for {suite}")
        before = tasks.get(suite, ())
        tasks[suite] = (*before, task) if slash and before is not None else None
    return tasks


def _tokens(codec: ChatCodec, text: str) -> tuple[int, ...]:
    return codec.chat_prompt([{"role": "user", "content": text}])


def _common(*prompts: Sequence[int]) -> int:
    """The length of the longest prefix that all `prompts` share."""
    alike = (len(set(tokens)) == 1 for tokens in zip(*prompts, strict=False))
    return sum(1 for _ in itertools.takewhile(bool, alike))
