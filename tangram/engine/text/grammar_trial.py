"""Try in a separate process whether grammars can be compiled within limits.

llguidance limits its work except for one part: the intersection of several expressions. That can
grow exponentially in time and memory, and a thread cannot be stopped. The process has little memory
and can be killed.

    python -P grammar_trial.py < SOURCES    # a list in JSON

It writes `BEGUN` when only a grammar can cause a failure. Then it writes a line of JSON for each
grammar that ends: null, or why it is none for tokens that are bytes. It imports nothing of Tangram,
so that it starts in a tenth of a second.
"""

from __future__ import annotations

import json
import os
import resource
import sys

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# Of a processor's time, and of time: more, so that a busy machine is not taken for a large grammar.
MOST_CPU_S, MOST_S = 2, 30
MOST_BYTES = 1 << 30
MOST_REASON_CHARACTERS = 500  # so few that a line is written as a whole
BEGUN = b"begun\n"

# Limits of work in llguidance's units: about 20 ms to build a lexer, 7 ms for a token.
LIMITS = LLParserLimits(
    max_items_in_row=5_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)


def main() -> None:
    """Compile the grammars on standard input, with bytes as tokens."""
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    # The process that started it may be gone; beyond the first limit the kernel sends SIGXCPU.
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_CPU_S, MOST_CPU_S + 1))
    sources = json.load(sys.stdin.buffer)
    tokens = LLTokenizer("byte")
    os.write(sys.stdout.fileno(), BEGUN)
    for source in sources:
        matcher = LLMatcher(tokens, LLMatcher.grammar_from_lark(source), log_level=0, limits=LIMITS)
        reason = matcher.get_error()[:MOST_REASON_CHARACTERS] if matcher.is_error() else None
        os.write(sys.stdout.fileno(), json.dumps(reason).encode() + b"\n")


if __name__ == "__main__":
    main()
