"""Scores of replies, by the rules of RULER and LoCoMo.

They are in arXiv 2404.06654, Section 4, and arXiv 2402.17753, 4.1.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable

from tangram_lab.accuracy.sample import Grade, Question

_ARTICLES = re.compile(r"\b(a|an|the|and)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_LABEL = re.compile(r"^(the )?(answer|label|category)( is)?\s*:?\s+", re.IGNORECASE)


def score_reply(question: Question, reply: str) -> float:
    """The score of `reply` in [0, 1], by the question's rule. No rule is case-sensitive.

    - "all": the share of the answers that occur (RULER's `string_match_all`).
    - "any": 1 if one of the answers occurs (RULER's `string_match_part`).
    - "code": 1 if one of the answers occurs. Blanks and kinds of quotes do not count.
    - "exact": 1 if the first line with text is an answer. Markup, a final stop and "Answer:" do not
      count.
    - "f1": token F1 after normalisation, best over the answers (LoCoMo, without its stemming).
    - "f1_parts": an answer is a comma-separated list. The score is the mean over its parts of the
      best F1 of the reply's parts (LoCoMo's multi-hop questions).
    - "choice": 1 if the reply is the first answer, the letter of an option such as "(b)", or if one
      of the others occurs.

    An answer occurs if it stands in the reply as whole words and numbers: 12 is not in 123, nor 1.5
    in 11.5. RULER does not require this.
    """
    return RULES[question.grade](question.answers, reply)


def occurs(answer: str, reply: str) -> bool:
    """Whether `answer` stands in `reply` as whole words and numbers, in any case of letters."""
    return _whole(answer, re.escape(answer), reply)


def _whole(answer: str, pattern: str, reply: str) -> bool:
    """Whether `pattern` matches without cutting a word or number at either end of `answer`."""
    before = (
        r"(?<!\w)(?<!\d\.)"
        if re.match(r"\d", answer)
        else r"(?<!\w)"
        if re.match(r"\w", answer)
        else ""
    )
    after = (
        r"(?!\w)(?!\.\d)"
        if re.search(r"\d\Z", answer)
        else r"(?!\w)"
        if re.search(r"\w\Z", answer)
        else ""
    )
    return re.search(f"{before}{pattern}{after}", reply, re.IGNORECASE) is not None


def token_f1(answer: str, reply: str) -> float:
    """F1 of the words that two texts share, as in SQuAD; two texts without words: 0.

    It is in arXiv 1606.05250, Section 6.
    """
    gold, given = Counter(_words(answer)), Counter(_words(reply))
    shared = (gold & given).total()
    return 2 * shared / (gold.total() + given.total()) if shared else 0.0


def _words(text: str) -> list[str]:
    """Lower case, no punctuation, no articles, and no "and", as LoCoMo has it."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def _all(answers: tuple[str, ...], reply: str) -> float:
    return sum(occurs(answer, reply) for answer in answers) / len(answers)


def _any(answers: tuple[str, ...], reply: str) -> float:
    return float(any(occurs(answer, reply) for answer in answers))


def _code(answers: tuple[str, ...], reply: str) -> float:
    return float(any(_whole(answer, _allow_spaces(answer), reply) for answer in answers))


def _allow_spaces(code: str) -> str:
    """A pattern for `code` with any blanks between words and signs, and either kind of quotes."""
    pieces = re.findall(r"\w+|[^\w\s]", code)
    return r"\s*".join("[\"']" if piece in "\"'" else re.escape(piece) for piece in pieces)


def _exact(answers: tuple[str, ...], reply: str) -> float:
    given = next((line for line in map(_bare, reply.splitlines()) if line), "")
    return float(given in {_bare(answer) for answer in answers})


def _bare(line: str) -> str:
    unmarked = line.strip(" \t`*_#>\"'.").lower()
    return _LABEL.sub("", unmarked).strip(" \t`*_\"'.")


def _f1(answers: tuple[str, ...], reply: str) -> float:
    return max(token_f1(answer, reply) for answer in answers)


def _f1_parts(answers: tuple[str, ...], reply: str) -> float:
    given = reply.split(",")

    def of_list(answer: str) -> float:
        parts = [part for part in answer.split(",") if _words(part)] or [answer]
        return sum(max(token_f1(part, one) for one in given) for part in parts) / len(parts)

    return max(of_list(answer) for answer in answers)


def _choice(answers: tuple[str, ...], reply: str) -> float:
    letter, *phrases = answers
    chosen = reply.strip(" \t\n.()").lower() == letter.strip("()").lower()
    return float(chosen or any(occurs(phrase, reply) for phrase in phrases))


RULES: dict[Grade, Callable[[tuple[str, ...], str], float]] = {
    "all": _all,
    "any": _any,
    "code": _code,
    "exact": _exact,
    "f1": _f1,
    "f1_parts": _f1_parts,
    "choice": _choice,
}
