"""LoCoMo: questions about long conversations, read from files of the user.

The dataset (Maharana et al., arXiv 2402.17753) is no part of Tangram. A conversation is cut into
windows of whole sessions, as many as fit, one after the other. Each window is a context. Its
questions are those whose evidence it contains, worded as in LoCoMo's own evaluation.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tangram.errors import ConfigError
from tangram_lab.accuracy.budget import Budget
from tangram_lab.accuracy.conversation import (
    AskedQuestion,
    Conversation,
    Session,
    read_conversations,
)
from tangram_lab.accuracy.sample import Grade, Question, Sample

SUITE = "locomo"
CATEGORIES = {1: "multi_hop", 2: "temporal", 3: "open_domain", 4: "single_hop", 5: "adversarial"}

_GRADES: dict[int, Grade] = {1: "f1_parts", 2: "f1", 3: "f1", 4: "f1"}
_REPLY_TOKENS = 50
_NOT_MENTIONED = ("Not mentioned", "No information available")
_SHORT_PHRASE = (
    "Based on the above context, write an answer in the form of a short phrase for the following "
    "question. "
    "Answer with exact words from the context whenever possible.\n\nQuestion: {} Short answer:"
)
_CHOICE = "Based on the above context, answer the following question.\n\nQuestion: {} Short answer:"


@dataclass(frozen=True)
class Window:
    """Sessions that fit into one context: their text, and each turn's text by its id."""

    text: str
    lines: dict[str, str]


def read_samples(path: Path, budget: Budget, seed: int) -> list[Sample]:
    """A sample for each window of each conversation; `task` is the conversation's name.

    Every question is asked in one sample or counted in one sample's `dropped_questions`. A question
    is dropped if no one window has all its evidence, if the file lacks its evidence, or if it has
    no answer. `seed` draws the order of a sample's questions, in which categories take turns. It
    also draws which option of a choice is "(a)". Raises `ConfigError` (field `path`, or
    `context_tokens` if no session fits).
    """
    samples = [
        sample
        for conversation in read_conversations(path)
        for sample in _of_conversation(conversation, budget, seed)
    ]
    if not samples:
        raise ConfigError(
            f"context_tokens is {budget.context_tokens}, and no session of {path} that questions "
            "are asked about fits: a session of LoCoMo has 500 to 1,500 tokens"
        )
    return samples


def windows(conversation: Conversation, budget: Budget) -> list[Window]:
    """The conversation in runs of whole sessions, each as many as fit.

    A session that is too long by itself is left out.
    """
    sessions = conversation.sessions
    sizes_tokens = [budget.count_tokens(session.text()) for session in sessions]
    found: list[Window] = []
    start = 0
    while start < len(sessions):
        sums = itertools.accumulate(sizes_tokens[start:])
        end = start + sum(total <= budget.context_tokens for total in sums)
        while (
            end > start
            and budget.count_tokens(_text(conversation, sessions[start:end]))
            > budget.context_tokens
        ):
            end -= 1  # sums lack the head and what joins sessions
        if end > start:
            turns = [turn for session in sessions[start:end] for turn in session.turns]
            lines = {turn.dia_id: turn.line() for turn in turns}
            found.append(Window(_text(conversation, sessions[start:end]), lines))
        start = max(end, start + 1)
    return found


def _text(conversation: Conversation, sessions: tuple[Session, ...]) -> str:
    first, second = conversation.speakers
    head = (
        f"Below is a conversation between two people: {first} and {second}. The conversation takes "
        "place over multiple days and the date of each conversation is written at the beginning of "
        "the conversation."
    )
    return "\n\n".join([head, *(session.text() for session in sessions), ""])


def _of_conversation(conversation: Conversation, budget: Budget, seed: int) -> list[Sample]:
    rng = random.Random(f"{SUITE}/{conversation.name}/{budget.context_tokens}/{seed}")
    cut = windows(conversation, budget)
    asked: list[list[Question]] = [[] for _ in cut]
    dropped = [0 for _ in cut]
    for one in conversation.asked:
        ids = one.turn_ids()
        # The window of the last turn of its evidence: most dropped questions would have been asked
        # there.
        home = max(
            (
                place
                for place, window in enumerate(cut)
                if any(turn in window.lines for turn in ids)
            ),
            default=0,
        )
        if (
            ids
            and _has_answer(one)
            and any(all(turn in window.lines for turn in ids) for window in cut)
        ):
            asked[home].append(_question(rng, one, tuple(cut[home].lines[turn] for turn in ids)))
        elif cut:
            dropped[home] += 1
    samples = [
        Sample(
            SUITE,
            conversation.name,
            number,
            window.text,
            tuple(_in_turns(rng, questions)),
            dropped_questions=count,
        )
        for number, (window, questions, count) in enumerate(zip(cut, asked, dropped, strict=True))
    ]
    return _without_empty(samples)


def _without_empty(samples: list[Sample]) -> list[Sample]:
    """The samples with questions. The first one also counts the dropped questions of the others."""
    kept = [sample for sample in samples if sample.questions]
    orphans = sum(sample.dropped_questions for sample in samples if not sample.questions)
    return (
        [replace(kept[0], dropped_questions=kept[0].dropped_questions + orphans), *kept[1:]]
        if kept
        else []
    )


def _has_answer(asked: AskedQuestion) -> bool:
    return asked.category == 5 or bool(asked.answer and asked.answer.strip())


def _question(rng: random.Random, asked: AskedQuestion, evidence: tuple[str, ...]) -> Question:
    category = CATEGORIES[asked.category]
    if asked.category == 5:
        return replace(_adversarial(rng, asked), evidence=evidence, category=category)
    answer = (asked.answer or "").strip()
    if asked.category == 3:
        answer = answer.split(";")[0].strip()  # the annotator's reason follows
    hint = (
        " Use DATE of CONVERSATION to answer with an approximate date."
        if asked.category == 2
        else ""
    )
    text = _SHORT_PHRASE.format(asked.question + hint)
    return Question(text, (answer,), _GRADES[asked.category], _REPLY_TOKENS, evidence, category)


def _adversarial(rng: random.Random, asked: AskedQuestion) -> Question:
    """Two options, of which "not mentioned" is right; no options if the file has no wrong one."""
    wrong = asked.adversarial_answer
    if wrong is None or wrong.lower().startswith("not mentioned"):
        return Question(_CHOICE.format(asked.question), _NOT_MENTIONED, "any", _REPLY_TOKENS)
    options = ["Not mentioned in the conversation", wrong]
    rng.shuffle(options)
    letter = "(a)" if options[1] == wrong else "(b)"
    text = f"{asked.question} Select the correct answer: (a) {options[0]} (b) {options[1]}."
    return Question(_CHOICE.format(text), (letter, *_NOT_MENTIONED), "choice", _REPLY_TOKENS)


def _in_turns(rng: random.Random, questions: list[Question]) -> Iterator[Question]:
    """Shuffled, one of each category after the other, so that the first few are of all kinds."""
    rng.shuffle(questions)
    turn: dict[str | None, int] = {}
    ranked = []
    for question in questions:
        turn[question.category] = turn.get(question.category, 0) + 1
        ranked.append((turn[question.category], question))
    return (question for _, question in sorted(ranked, key=lambda one: one[0]))
