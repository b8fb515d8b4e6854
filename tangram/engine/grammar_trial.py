"""Tries in a process of its own whether a grammar can be made: one that has little memory, and can
be ended.

llguidance bounds its work but for one part: whether what several expressions ask for together can
be met at all. That multiplies out, in time and memory, and nobody can stop a thread that is at it.

    python -P grammar_trial.py < SOURCE     # code 0: it ends, well or with a reason

It writes `BEGUN` when nothing but the grammar is left to blame for how it ends.

Nothing of Tangram is imported here, so that it starts in a tenth of a second.
"""

from __future__ import annotations

import os
import resource
import sys

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MOST_S = 5
MOST_BYTES = 1 << 30
BEGUN = b"begun\n"

# Bounds on work, in llguidance's units: about 20 ms of making a lexer, 7 ms for a token.
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
    """Make the grammar on standard input, of bytes in place of tokens."""
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_S, MOST_S))  # whoever began it may be gone
    source = sys.stdin.buffer.read().decode()
    tokens = LLTokenizer("byte")
    os.write(sys.stdout.fileno(), BEGUN)
    LLMatcher(tokens, LLMatcher.grammar_from_lark(source), log_level=0, limits=LIMITS)


if __name__ == "__main__":
    main()
