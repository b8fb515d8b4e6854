"""Several questions on one context, after SCBench, on generated texts.

It is Li et al., arXiv 2412.10319, Section 3. The cache of the context is built before any question
is known and serves all of them, as in a conversation.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

from tangram_lab.accuracy import words
from tangram_lab.accuracy.budget import Budget, Stock
from tangram_lab.accuracy.code_lookup import code_lookup
from tangram_lab.accuracy.haystack import hide_needles, prose
from tangram_lab.accuracy.needles import Needles
from tangram_lab.accuracy.sample import Draft, Question, Task

_ASKED = 5
_STRING_CHARACTERS, _AFFIX_CHARACTERS = 36, 6
_STATIONS = 6
_SHOTS_ASKED = 5

# The subjects of sentences, by kind. Each sample invents the labels of the kinds.
_KINDS: tuple[tuple[str, ...], ...] = (
    (
        "sparrow",
        "badger",
        "salmon",
        "tortoise",
        "beetle",
        "donkey",
        "otter",
        "pigeon",
        "lizard",
        "hamster",
    ),
    (
        "bread",
        "soup",
        "cheese",
        "pancake",
        "noodle",
        "pudding",
        "salad",
        "biscuit",
        "sausage",
        "omelette",
    ),
    (
        "violin",
        "trumpet",
        "drum",
        "flute",
        "piano",
        "cello",
        "guitar",
        "harp",
        "clarinet",
        "accordion",
    ),
    (
        "train",
        "bicycle",
        "ferry",
        "tractor",
        "tram",
        "helicopter",
        "canoe",
        "lorry",
        "scooter",
        "bus",
    ),
)
_SHOTS = (
    "Yesterday {who} spoke about a {trait} {thing} for {count} minutes.",
    "{who} drew a {trait} {thing} on page {count} of the notebook.",
    "The {trait} {thing} cost {who} about {count} crowns.",
    "{who} dreamt of {count} people standing around a {trait} {thing}.",
    "In the photograph, {who} points at a {trait} {thing} with the number {count}.",
)
_TRAITS = (
    "big",
    "small",
    "strange",
    "lovely",
    "famous",
    "new",
    "second",
    "plain",
    "different",
    "perfect",
)


def key_values(rng: random.Random, budget: Budget) -> Draft:
    """A JSON object of UUIDs; each question asks for the value of one key (SCBench's Retr.KV)."""
    supply = words.uuids(rng)
    pairs = (f'"{key}": "{value}"' for key, value in zip(supply, supply, strict=True))
    asked = words.take(pairs, _ASKED)
    head = (
        "Extract the value corresponding to the specified key in the JSON object "
        "below.\n\nJSON data:\n{"
    )
    text = hide_needles(rng, pairs, asked, ",\n").fill(budget, head, "}\n\n")
    return Draft(text, tuple(_of_pair(pair) for pair in asked))


def _of_pair(pair: str) -> Question:
    key, value = pair.split('"')[1::2]
    return Question(
        f'Key: "{key}"\nThe value associated with the specified key is:',
        (value,),
        "any",
        64,
        (pair,),
    )


def prefix_suffix(rng: random.Random, budget: Budget) -> Draft:
    """Random strings; each question gives the ends of one (SCBench's Retr.Prefix-Suffix).

    Each string has two distractors: one with the same beginning and one with the same end.
    """
    supply = words.characters(rng, _STRING_CHARACTERS)
    asked = words.take(supply, _ASKED)
    others = words.take(supply, 2 * _ASKED)
    cut = _AFFIX_CHARACTERS
    hidden = [
        *asked,
        *(string[:cut] + other[cut:] for string, other in zip(asked, others[:_ASKED], strict=True)),
        *(
            other[:-cut] + string[-cut:]
            for string, other in zip(asked, others[_ASKED:], strict=True)
        ),
    ]
    ends = {end for string in asked for end in (string[:cut], string[-cut:])}
    strings = (
        string for string in supply if string[:cut] not in ends and string[-cut:] not in ends
    )
    head = (
        "Below is a list of strings, one on each line. Find the one with the specified beginning "
        "and end.\n\n"
    )
    text = hide_needles(rng, strings, hidden, "\n").fill(budget, head, "\n\n")
    return Draft(text, tuple(_of_string(string, cut) for string in asked))


def _of_string(string: str, cut: int) -> Question:
    ask = (
        f'Which string begins with "{string[:cut]}" and ends with "{string[-cut:]}"? The whole '
        "string is:"
    )
    return Question(ask, (string,), "any", 64, (string,))


def many_shot(rng: random.Random, budget: Budget) -> Draft:
    """Sentences with invented labels for their subjects; a question asks for a new one's label.

    The new sentence has the subject of a labelled one, which is its evidence.
    """
    label_of = dict(zip(_KINDS, words.take(words.labels(rng), len(_KINDS)), strict=True))
    asking = random.Random(rng.getrandbits(64))
    shots = Stock(_shots(rng, label_of))
    names = ", ".join(sorted(label_of.values()))
    head = f"Below are sentences, each with its label. The labels are {names}.\n\n"

    def write(count: int) -> str:
        return head + "".join(f"{shot}\n\n" for _, shot in shots.first(count))

    count = budget.fill(write, fewest=len(_KINDS))
    shown = dict(reversed(shots.first(count)))
    new = Stock(shot for shot in _shots(asking, label_of) if shot[0] in shown)
    things = dict(reversed(new.first(20 * _SHOTS_ASKED)))
    asked = itertools.islice(things.items(), _SHOTS_ASKED)
    return Draft(write(count), tuple(_of_shot(shot, shown[thing]) for thing, shot in asked))


def _shots(rng: random.Random, label_of: dict[tuple[str, ...], str]) -> Iterator[tuple[str, str]]:
    """A subject and the labelled sentence about it. Kinds take turns in a random order."""
    names = words.people(rng)
    while True:
        for kind in rng.sample(_KINDS, len(_KINDS)):
            thing = rng.choice(kind)
            sentence = rng.choice(_SHOTS).format(
                who=next(names), trait=rng.choice(_TRAITS), thing=thing, count=rng.randint(2, 99)
            )
            yield thing, f"Sentence: {sentence}\nLabel: {label_of[kind]}"


def _of_shot(shot: str, evidence: str) -> Question:
    sentence, label = shot.split("\nLabel: ")
    return Question(
        f"Give the label of this sentence, and nothing else.\n{sentence}\nLabel:",
        (label,),
        "exact",
        16,
        (evidence,),
    )


def report(rng: random.Random, budget: Budget) -> Draft:
    """A report in which six stations name a figure; questions ask for all, then for single ones.

    It replaces SCBench's En.Sum: a summary whose completeness can be counted.
    """
    stations, figures = (
        words.take(words.towns(rng), _STATIONS),
        words.take(words.numbers(rng, 5), _STATIONS),
    )
    facts = [
        f"The station of {place} reported {figure} passengers."
        for place, figure in zip(stations, figures, strict=True)
    ]
    asked = rng.sample(range(_STATIONS), 3)
    head = (
        "Read the following yearly report. You will be asked about the figures that the stations "
        "reported.\n\n"
    )
    text = hide_needles(rng, prose(random.Random(rng.getrandbits(64))), facts, " ").fill(
        budget, head, "\n\n"
    )
    every = (
        f"Summarise the report: name each of the {_STATIONS} stations that reported passengers, "
        "and how many. The stations and their passengers are:"
    )
    one = [
        Question(
            f"How many passengers did the station of {stations[index]} report? The number is",
            (figures[index],),
            "any",
            24,
            (facts[index],),
        )
        for index in asked
    ]
    return Draft(text, (Question(every, (*stations, *figures), "all", 160, tuple(facts)), *one))


TASKS: dict[str, Task] = {
    "key_values": key_values,
    "prefix_suffix": prefix_suffix,
    "many_shot": many_shot,
    "report": report,
    "code_lookup": code_lookup,
    # The task that even small models can answer.
    "needles": Needles("noise", keys=4),
}
