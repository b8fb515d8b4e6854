"""RULER's tracing and counting tasks: variables, common words, frequent words (arXiv 2404.06654,
Section 3).
"""

from __future__ import annotations

import itertools
import math
import random

from tangram_lab.accuracy import words
from tangram_lab.accuracy.budget import Budget, Stock
from tangram_lab.accuracy.haystack import hide_needles, noise
from tangram_lab.accuracy.sample import Draft, Question

_REPLY_TOKENS = 60  # RULER has 30, too few for tokenizers that spell out capital letters
_CHAIN = 5  # a value, given to a variable, and four hops
_COMMON_WORDS = 10
_COMMON_REPEATS, _REPEATS_RATIO = 30, 10  # RULER's 30 and 3
_FEWEST_ENTRIES = 60
_FEWEST_CODED = 100  # from here on the third word comes more often than the fourth
_ZETA = math.pi**2 / 6  # for RULER's exponent, 2


def variable_tracking(rng: random.Random, budget: Budget) -> Draft:
    """One chain of assignments in noise: a question asks which variables have the value.

    Another, beyond RULER, asks for the value of the last variable.
    """
    names = words.take(words.variables(rng), _CHAIN)
    value = words.take(words.numbers(rng, 5), 1)[0]
    chain = [f"VAR {names[0]} = {value}"]
    chain += [f"VAR {name} = VAR {before}" for before, name in itertools.pairwise(names)]
    head = (
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
    )
    text = hide_needles(rng, noise(), chain, "\n", in_order=True).fill(budget, head, "\n")
    which = (
        f"Question: Find all variables that are assigned the value {value} in the text above. "
        f"Answer: According to the chain(s) of variable assignment in the text above, {_CHAIN} "
        f"variables are assigned the value {value}, they are:"
    )
    what = (
        f"Question: Which number does the variable {names[-1]} have in the text above, by the "
        f"chain of assignments? Answer: The variable {names[-1]} has the number"
    )
    evidence = tuple(chain)
    return Draft(
        text,
        (
            Question(which, tuple(names), "all", _REPLY_TOKENS, evidence),
            Question(what, (value,), "any", 30, evidence),
        ),
    )


def common_words(rng: random.Random, budget: Budget) -> Draft:
    """A numbered list in which ten words come 30 times and others 3 times.

    In a short list common words are half of it. The others come a tenth as
    often, rounded down, but at least once.
    """
    supply = words.english(rng)
    common, rare = words.take(supply, _COMMON_WORDS), Stock(supply)
    order = rng.getrandbits(64)
    head = (
        "Below is a numbered list of words. In these words, some appear more often than others. "
        "Memorize the ones that appear most often.\n"
    )

    def write(entries: int) -> str:
        repeats = min(_COMMON_REPEATS, entries // (2 * _COMMON_WORDS))
        rare_repeats = max(1, repeats // _REPEATS_RATIO)
        left = entries - repeats * _COMMON_WORDS
        others = [
            word for word in rare.first(math.ceil(left / rare_repeats)) for _ in range(rare_repeats)
        ][:left]
        listed = common * repeats + others
        random.Random(order).shuffle(listed)
        return head + " ".join(f"{number}. {word}" for number, word in enumerate(listed, 1)) + "\n"

    ask = (
        "Question: What are the 10 most common words in the above list? Answer: The top 10 words "
        "that appear most often in the list are:"
    )
    text = write(budget.fill(write, fewest=_FEWEST_ENTRIES))
    return Draft(text, (Question(ask, tuple(common), "all", 120),))


def frequent_words(rng: random.Random, budget: Budget) -> Draft:
    """Coded words whose frequencies follow Zipf's law with exponent 2.

    The most frequent is dots; the question asks for the next three. Of n drawn words the one of
    rank k comes floor(n / (k² ζ(2))) times.
    """
    vocabulary, order = Stock(words.draw_coded_words(rng)), rng.getrandbits(64)
    head = (
        "Read the following coded text and track the frequency of each coded word. Find the three "
        "most frequently appeared coded words. "
    )

    def write(drawn: int) -> str:
        ranks = math.isqrt(int(drawn / _ZETA))
        ranked = ["...", *vocabulary.first(max(ranks - 1, 3))]
        coded = [
            word
            for rank, word in enumerate(ranked, 1)
            for _ in range(int(drawn / (rank**2 * _ZETA)))
        ]
        random.Random(order).shuffle(coded)
        return head + " ".join(coded) + "\n"

    text = write(budget.fill(write, fewest=_FEWEST_CODED))
    ask = (
        "Question: Do not provide any explanation. Please ignore the dots '....'. What are the "
        "three most frequently appeared words in the above coded text? Answer: According to the "
        "coded text above, the three most frequently appeared words are:"
    )
    return Draft(text, (Question(ask, tuple(vocabulary.first(3)), "all", 50),))
