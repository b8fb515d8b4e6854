"""Grammars that answers must follow, by llguidance.

It is an Earley parser over the tokens' bytes with a lexer built lazily. A grammar is text in
llguidance's Lark dialect, with JSON schemas as `%json {...}`. It is compiled outside the engine's
thread. For each token only the allowed tokens are looked up, in some tens of microseconds.
"""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from tokenizers.normalizers import ByteLevel

from tangram.engine.text import grammar_trial
from tangram.engine.text.grammar_trial import BEGUN, LIMITS, MOST_CPU_S, MOST_S
from tangram.engine.text.recent_texts import RecentTexts
from tangram.errors import MachineError, RequestError
from tangram.types import UInt8

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

_MOST_REASON_CHARACTERS = 300
_KEPT_GRAMMARS = 32
_KEPT_REFUSALS = 128
_KEPT_SOURCE_CHARACTERS = 1 << 22  # a compiled grammar takes some 30 bytes for each
# Signals that end the server and its child processes; they say nothing about a grammar.
_ENDED_FROM_OUTSIDE = (-signal.SIGINT, -signal.SIGTERM, -signal.SIGHUP)
# Errors for which llguidance gives only the name of a state.
_IN_WORDS = dict.fromkeys(("NoExtension", "NoExtensionBias"), "no text satisfies it")
_TOO_LARGE = f"takes more than {MOST_CPU_S} s or too much memory to make a grammar of"
_log = logging.getLogger("tangram")


class GrammarCompiler:
    """Compiles grammars for one model's tokens; `end_token_ids` end its texts.

    Safe to share between threads.
    """

    most_trial_s = MOST_CPU_S

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, end_token_ids: Iterable[int]
    ) -> None:
        self._tokenizer, self._vocab_size, self._ends = tokenizer, vocab_size, sorted(end_token_ids)
        # Conversations repeat their tools with every turn. Refusals are kept apart, so that they
        # evict no grammar.
        most = _KEPT_SOURCE_CHARACTERS
        self._compiled = RecentTexts[CompiledGrammar](_KEPT_GRAMMARS, most)
        self._refused = RecentTexts[str](_KEPT_REFUSALS, most)
        self._faults = RecentTexts[dict[int, str]](_KEPT_REFUSALS, most)

    def __reduce__(self) -> tuple[object, ...]:
        """To another process it travels as what it is made of, without what it has compiled."""
        return GrammarCompiler, (self._tokenizer, self._vocab_size, self._ends)

    @cached_property
    def _tokens(self) -> LLTokenizer | None:
        """None if this tokenizer's tokens are no bytes. Made once, which blocks the interpreter."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        try:
            return (
                None
                if backend is None
                else LLTokenizer(_describe(backend), self._vocab_size, self._ends or None)
            )
        except (ValueError, RuntimeError):
            return None

    def warm(self) -> None:
        """Prepare the work that the first grammar would wait for."""
        _ = self._tokens

    def look_up(self, source: str, field: str) -> CompiledGrammar | None:
        """The grammar `source` if `compile` has made it recently; None if it has not.

        Never waits. Raises the `RequestError` (`field`) that `compile` has raised.
        """
        reason = self._refused.find((source, field))
        if reason is not None:
            raise RequestError(reason, field)
        return self._compiled.find((source, field))

    def compile(self, source: str, field: str) -> CompiledGrammar:
        """The grammar `source`, with its first mask. Results are kept for later calls.

        Raises `RequestError` (`field`) with the fault, or `MachineError` if the check could not
        run.
        """
        grammar = self.look_up(source, field)
        if grammar is not None:
            return grammar
        try:
            grammar = self._compile(source, field)
        except RequestError as error:
            self._refused.keep((source, field), str(error))
            raise
        self._compiled.keep((source, field), grammar)
        return grammar

    def find_faults(self, sources: Sequence[str]) -> dict[int, str]:
        """Which of `sources` are no grammars, by their places, and why.

        Raises `MachineError` if the check could not run.
        """
        key = tuple(sources)
        known = self._faults.find(key)
        if known is not None:
            return known
        tried = _try(sources, "tools")
        reasons = [*tried, *[_TOO_LARGE] * (len(sources) - len(tried))]
        faults = {
            at: _in_one_line(reason) for at, reason in enumerate(reasons) if reason is not None
        }
        self._faults.keep(key, faults)
        return faults

    def _compile(self, source: str, field: str) -> CompiledGrammar:
        if self._tokens is None:
            message = (
                f"{field}: this model does not support grammars, its tokenizer does not tell the "
                "bytes of its tokens"
            )
            raise RequestError(f"{message}: leave the field out", field)
        if not _try([source], field):
            raise RequestError(f"{field} {_TOO_LARGE}: make it simpler", field)
        matcher = LLMatcher(
            self._tokens, LLMatcher.grammar_from_lark(source), log_level=0, limits=LIMITS
        )
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise RequestError(f"{field} is no valid grammar: {_reason(matcher)}", field)
        return CompiledGrammar(matcher, source, field)


def _try(sources: Sequence[str], field: str) -> list[str | None]:
    """What is wrong with each of `sources` that compiles within the limits of time and memory.

    The first that does not ends the list. Raises `MachineError` if the trial could not run; the log
    has the reason.
    """
    command = [sys.executable, "-P", str(Path(grammar_trial.__file__))]
    try:
        ended = subprocess.run(
            command,
            input=json.dumps(list(sources)).encode(),
            capture_output=True,
            timeout=MOST_S,
            check=False,
        )
        code, begun = ended.returncode, ended.stdout.startswith(BEGUN)
        written = ended.stdout.removeprefix(BEGUN).splitlines()
        reason = f"code {code}, {ended.stderr[-_MOST_REASON_CHARACTERS:]!r}"
    except subprocess.TimeoutExpired:
        code, begun, written = None, False, []
        reason = f"not ended in {MOST_S} s, too few of them on a processor"
    except OSError as error:
        code, begun, written, reason = None, False, [], str(error)
    if not begun or code in _ENDED_FROM_OUTSIDE:
        _log.error("the trial process of a grammar could not run: %s", reason)
        raise MachineError(
            f"{field}: the server could not try the grammar just now: send the request again in a "
            "while"
        )
    return [json.loads(line) for line in written]


def _describe(backend: Tokenizer) -> str:
    """`backend` as JSON, its added tokens that are text moved among the ordinary tokens.

    llguidance takes every added token in angle brackets for a control token, which text cannot
    have: `<think>` of Qwen3 too, that is text in an answer.
    """
    description = json.loads(backend.to_str())
    vocabulary, added = description["model"].get("vocab"), description["added_tokens"]
    if isinstance(vocabulary, dict):  # in a list the place of a piece is its number
        spell = ByteLevel().normalize_str if _has_byte_alphabet(description) else str
        # All of them: a name that is not in the vocabulary gets another number.
        for token in added:
            name = token["content"]
            vocabulary[name if token["special"] else spell(name)] = token["id"]
        description["added_tokens"] = [token for token in added if token["special"]]
    return json.dumps(description, ensure_ascii=False)


def _has_byte_alphabet(description: dict[str, Any]) -> bool:
    """Whether tokens are written in GPT-2's byte alphabet."""
    decoder = description["decoder"] or {}
    return any(part.get("type") == "ByteLevel" for part in decoder.get("decoders", [decoder]))


class CompiledGrammar:
    """`types.Grammar`, of the text `source` in the request's `field`."""

    def __init__(self, matcher: LLMatcher, source: str, field: str) -> None:
        self._matcher, self.source, self.field = matcher, source, field

    def begin(self) -> GrammarMatcher:
        """The state of a completion that has no token yet."""
        return GrammarMatcher(self._matcher.deep_copy(), self.field)


class GrammarMatcher:
    """`types.Matcher`."""

    def __init__(self, matcher: LLMatcher, field: str) -> None:
        self._matcher, self._field = matcher, field
        self.error: RequestError | None = None

    def mask_tokens(self) -> UInt8:
        """See `types.Matcher`. Too much work for one token is an error at the next token."""
        return np.frombuffer(bytearray(self._matcher.compute_bitmask()), np.uint8)

    def take(self, token: int) -> None:
        """See `types.Matcher`."""
        if self._matcher.is_error() or not self._matcher.consume_token(token):
            message = (
                f"{self._field}: the grammar cannot be followed any further: "
                f"{_reason(self._matcher)}"
            )
            self.error = RequestError(f"{message}: make it simpler", self._field)


def _reason(matcher: LLMatcher) -> str:
    """llguidance's message in one line."""
    return _in_one_line(matcher.get_error())


def _in_one_line(error: str) -> str:
    text = " ".join(error.replace("<non-verbose/>", "").split())
    text = _IN_WORDS.get(text, text)
    return text if len(text) <= _MOST_REASON_CHARACTERS else f"{text[:_MOST_REASON_CHARACTERS]}…"
