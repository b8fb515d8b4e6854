"""Calibration texts that every machine can make: retrieval tasks, and Python's sources and docs.

Head budgets come out nearly the same for any text of one kind and less so across kinds. So the
kinds are mixed evenly, and every run of `len(KINDS)` texts holds each kind once.
"""

from __future__ import annotations

import importlib
import itertools
import random
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

from tangram.errors import ConfigError

# Takes a random generator and a length in characters; writes at most that, and at most
# _LONGEST_LINE less.
Writer = Callable[[random.Random, int], str]

_SHORTEST = 1_000
_LONGEST_LINE = 200
_SPREAD = 1.5

_PEOPLE = (
    "Amara Boateng",
    "Lucas Ferreira",
    "Ingrid Solberg",
    "Kenji Watanabe",
    "Priya Raman",
    "Tomasz Nowak",
    "Leila Haddad",
    "Oliver Grant",
    "Sofia Marchetti",
    "Daniel Okafor",
    "Hana Novakova",
    "Miguel Torres",
    "Ruth Abrams",
    "Farid Karimi",
    "Elsa Lindqvist",
    "Wei Zhang",
)
_PLACES = (
    "the old harbour",
    "the northern archive",
    "the railway museum",
    "the botanical garden",
    "the river market",
    "the observatory",
    "the glass workshop",
    "the city library",
    "the mountain hut",
    "the ferry terminal",
    "the concert hall",
    "the salt mine",
    "the lighthouse",
    "the weather station",
    "the print shop",
    "the quarry",
)
_THINGS = (
    "ledger",
    "lantern",
    "telescope",
    "manuscript",
    "compass",
    "engine",
    "mosaic",
    "violin",
    "seed bank",
    "turbine",
    "tapestry",
    "chronometer",
    "map",
    "kiln",
    "bridge",
    "recording",
    "sculpture",
    "barometer",
    "loom",
    "sailing boat",
)
_TRAITS = (
    "fragile",
    "carefully restored",
    "half forgotten",
    "surprisingly heavy",
    "locally famous",
    "poorly documented",
    "freshly painted",
    "slightly damaged",
    "remarkably quiet",
    "hand made",
    "costly",
    "much older than expected",
)
_ACTIONS = (
    "catalogued",
    "repaired",
    "photographed",
    "borrowed",
    "measured",
    "described",
    "moved",
    "insured",
    "tested",
    "drew",
    "cleaned",
    "compared",
    "sold",
    "rebuilt",
)
_TIMES = (
    "In early spring",
    "After the flood",
    "Before sunrise",
    "During the long winter",
    "On a rainy Tuesday",
    "Two years later",
    "At the end of the season",
    "While the others slept",
    "Shortly after noon",
    "Last October",
)
_REASONS = (
    "because the insurance demanded it",
    "although nobody had asked for it",
    "so that the visitors could see it",
    "since the budget was running out",
    "without telling the committee",
    "as the letter had instructed",
    "despite the broken heating",
    "in the hope of a better offer",
    "until the roof was finished",
)
_SENTENCES = (
    "{time}, {person} {action} the {thing} at {place}, {reason}.",
    "The {thing} of {place} is {trait}, and {person} has {number} pages of notes about it.",
    "Nobody at {place} could explain why the {thing} seemed {trait} {reason}.",
    '"We counted {number} of them," said {person}, "and every {thing} was {trait}."',
    "{person} walked from {place} to {other} in {number} minutes, {reason}.",
    "There were {number} visitors that day; most of them came for the {thing}, which was {trait}.",
    "If the {thing} had not been {trait}, {person} would have {action} it {reason}.",
    "How did a {trait} {thing} reach {place}? {person} asked {other_person}, who only smiled.",
    "{time} the work stopped: {person} had {action} the wrong {thing}, and {other_person} noticed "
    "it at {other}.",
    "A short report about {place} lists the {thing}, {number} chairs and a {trait} {other_thing}.",
)


# Enough for a first start (docs/calibration.md); `tangram calibrate` takes 50 longer texts.
QUICK_SAMPLES = 8  # one of each kind
_QUICK_TOKENS = 1024


def make_texts(count: int = 50, seed: int = 0, *, min_characters: int = 8_000) -> list[str]:
    """`count` texts of mixed kinds, each `min_characters` to about 1.5 times that long.

    The same Python version, seed and count give the same texts. Plain English has 4 to 5 characters
    a token, so `min_characters` of 6 · C fills a chunk of C tokens. Raises `ConfigError` if an
    argument is out of range.
    """
    if count < 1:
        raise ConfigError(f"count is {count}, it must be at least 1")
    if min_characters < _SHORTEST:
        raise ConfigError(f"min_characters is {min_characters}, it must be at least {_SHORTEST}")
    return [
        _one(kind, KINDS[kind], f"{seed}/{index}", min_characters)
        for index, kind in enumerate(list_kinds(count))
    ]


def quick_tokens(chunk_tokens: int) -> int:
    """How much of each text a quick calibration reads: whole chunks, about 1,024 tokens or one."""
    return chunk_tokens * max(1, _QUICK_TOKENS // chunk_tokens)


def list_kinds(count: int) -> list[str]:
    """The kind, a key of `KINDS`, of each of `count` calibration texts."""
    return list(itertools.islice(itertools.cycle(KINDS), count))


def _one(kind: str, write: Writer, seed: str, min_characters: int) -> str:
    rng = random.Random(f"{kind}/{seed}")  # seeded by text, which hashes the same in every process
    return write(rng, rng.randint(min_characters, int(min_characters * _SPREAD)) + _LONGEST_LINE)


def _fill(pieces: Iterator[str], characters: int, separator: str) -> str:
    """Pieces joined until they reach `characters`, then cut back to a line end.

    In prose the cut is at a word end.
    """
    text = next(pieces)
    while len(text) < characters:
        text += separator + next(pieces)
    end = text.rfind("\n" if separator == "\n" else " ", characters - _LONGEST_LINE, characters)
    return text[: end if end > 0 else characters]


def sentence(rng: random.Random) -> str:
    """One of ten patterns of artificial English, filled in at random, of some 100 characters."""
    return rng.choice(_SENTENCES).format(
        time=rng.choice(_TIMES),
        person=rng.choice(_PEOPLE),
        other_person=rng.choice(_PEOPLE),
        action=rng.choice(_ACTIONS),
        thing=rng.choice(_THINGS),
        other_thing=rng.choice(_THINGS),
        place=rng.choice(_PLACES),
        other=rng.choice(_PLACES),
        trait=rng.choice(_TRAITS),
        reason=rng.choice(_REASONS),
        number=rng.randint(2, 400),
    )


def _paragraphs(rng: random.Random) -> Iterator[str]:
    while True:
        yield " ".join(sentence(rng) for _ in range(rng.randint(3, 8)))


def _code(rng: random.Random) -> str:
    return f"{rng.choice(_THINGS).replace(' ', '-')}-{rng.randint(10_000, 999_999)}"


def _hide_facts(rng: random.Random, characters: int, facts: list[str], questions: list[str]) -> str:
    """Filler prose with the facts at random places and the questions at the end."""
    capacity = characters - sum(len(text) + 2 for text in facts + questions)
    paragraphs = _fill(_paragraphs(rng), capacity, "\n\n").split("\n\n")
    for fact in facts:
        paragraphs.insert(rng.randrange(len(paragraphs)), fact)
    return "\n\n".join([*paragraphs, *questions])


def _needle(rng: random.Random, characters: int) -> str:
    place = rng.choice(_PLACES)
    fact = f"The secret pass phrase of {place} is {_code(rng)}."
    return _hide_facts(
        rng,
        characters,
        [fact],
        [f"Question: What is the secret pass phrase of {place}?", "Answer:"],
    )


def _facts(rng: random.Random, characters: int) -> str:
    people = rng.sample(_PEOPLE, 6)
    facts = [
        f"Note: {person} was born in {rng.randint(1900, 1999)} and keeps the {_code(rng)}."
        for person in people
    ]
    asked = rng.sample(people, 3)
    return _hide_facts(
        rng, characters, facts, [f"Question: When was {person} born?" for person in asked]
    )


def _key_values(rng: random.Random, characters: int) -> str:
    def lines() -> Iterator[str]:
        while True:
            yield (
                f'  "{rng.choice(_TRAITS)} {rng.choice(_THINGS)} {rng.randint(100, 9999)}": '
                f'"{_code(rng)}",'
            )

    head, tail = "Below is a JSON object.\n{\n", '\n}\nThe value of the key "{key}" is'
    body = _fill(lines(), characters - len(head + tail) - 60, "\n")
    key = rng.choice(body.split("\n")).split('"')[1]
    return head + body + tail.replace("{key}", key)


def _table(rng: random.Random, characters: int) -> str:
    def rows() -> Iterator[str]:
        for number in itertools.count(1):
            date = f"2024-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"
            thing, place = rng.choice(_THINGS), rng.choice(_PLACES)
            yield (
                f"| {number} | {date} | {thing} | {place} | {rng.randint(1, 90)} | "
                f"{rng.uniform(1, 900):.2f} |"
            )

    head = "| No | Date | Item | Place | Quantity | Price |\n|---|---|---|---|---|---|\n"
    question = (
        f"\n\nWhich row holds the highest price of any {rng.choice(_THINGS)}, and where "
        "was it sold?"
    )
    return head + _fill(rows(), characters - len(head + question), "\n") + question


def _dialogue(rng: random.Random, characters: int) -> str:
    first, second = rng.sample(_PEOPLE, 2)

    def turns() -> Iterator[str]:
        while True:
            yield f"{first}: {sentence(rng)} What do you know about {_code(rng)}?"
            yield f"{second}: {' '.join(sentence(rng) for _ in range(rng.randint(1, 4)))}"

    return _fill(turns(), characters, "\n")


def _log(rng: random.Random, characters: int) -> str:
    services = ("gateway", "billing", "search", "mailer", "scheduler")
    outcomes = (
        "INFO request served",
        "INFO cache refreshed",
        "WARN retrying upstream",
        "ERROR connection reset",
    )

    def lines() -> Iterator[str]:
        for clock in itertools.count(rng.randint(0, 3600), rng.randint(2, 30)):
            time = f"{clock // 3600 % 24:02}:{clock // 60 % 60:02}:{clock % 60:02}"
            yield (
                f"{time} {rng.choice(services)} {rng.choice(outcomes)} id={_code(rng)} "
                f"ms={rng.randint(1, 4000)}"
            )

    return _fill(lines(), characters, "\n")


def _source(rng: random.Random, characters: int) -> str:
    """Modules of the standard library; its documentation where the sources are not installed."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    rng.shuffle(paths)
    modules = (path.read_text(encoding="utf-8", errors="replace") for path in paths)
    return _fill(itertools.chain(modules, topics(rng)), characters, "\n")


def _documentation(rng: random.Random, characters: int) -> str:
    return _fill(topics(rng), characters, "\n")


def topics(rng: random.Random) -> Iterator[str]:
    """The topics of Python's `help()`, shuffled, over and over."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    pages = [topics[name] for name in sorted(topics)]
    rng.shuffle(pages)
    return itertools.cycle(pages)


KINDS: dict[str, Writer] = {
    "needle": _needle,
    "source": _source,
    "key_values": _key_values,
    "facts": _facts,
    "documentation": _documentation,
    "table": _table,
    "dialogue": _dialogue,
    "log": _log,
}
