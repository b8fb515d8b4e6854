"""Endless supplies of names and words for generated texts, without repetition."""

from __future__ import annotations

import itertools
import random
import re
import string
import uuid
from collections.abc import Callable, Iterator, Sequence

from tangram.calibrate.texts import topics


def _list(words: str) -> tuple[str, ...]:
    return tuple(words.split())


_QUALITIES = _list(
    "agile amber ancient ashen bitter blunt bold brave brisk broad calm candid clever cobalt "
    "cosmic crimson crisp curious daring dim dusty eager early elder fabled faint fierce flat "
    "fluent frosty gentle giddy gilded glad grand hasty hidden hollow humble icy idle ivory jolly "
    "keen kind lanky late lean lively loyal lucid lunar meek mellow merry mild misty modest mossy "
    "muted narrow nimble noble odd olive opal pale patient plain proud quaint quick quiet rapid "
    "rare robust rosy rough round royal rusty sandy scarlet serene sharp shy silent silver sleek "
    "slim smooth snowy sober solid spry stark steady stern stout subtle sunny sweet swift tender "
    "thrifty tidy tiny vast velvet vivid warm wary wild windy wise witty young zesty"
)
_OBJECTS = _list(
    "acorn anchor apron arrow badge badger bagel barrel basin beacon bench birch blanket bonnet "
    "bottle bramble brook bucket buckle button cabin cactus candle canoe canyon carpet castle "
    "cedar cello chalk cherry chisel cider clover coral cotton cradle crane cricket crown curtain "
    "dagger daisy desk dolphin donkey drum dune eagle elm ember falcon feather fern ferret fiddle "
    "flask flute forest fossil fountain fox garden garlic glacier goblet goose grove hammer harbor "
    "harp hazel hedge helmet heron hill igloo island ivy jacket jar jasmine jewel juniper kettle "
    "kite ladder lagoon lantern lemon lily locket lynx magnet mango maple marble meadow melon "
    "mirror mitten moth needle nest oak ocean orchid otter owl paddle palm parrot pebble pepper "
    "piano pigeon pillow pine planet plum pocket pond prism puzzle quartz quill rabbit raft raven "
    "ribbon river rocket saddle saffron sail salmon scarf shell shovel sparrow spoon spruce "
    "squirrel stone tulip tunnel turnip violet walnut whistle willow window wolf zebra"
)
_FIRST_NAMES = _list(
    "Adela Aldo Alma Anton Astrid Basil Beatrix Bruno Cecily Clemens Cosima Dagmar Darius Dora "
    "Edgar Elias Elvira Emil Esther Fabian Felicia Fergus Flora Gideon Gilda Gustav Harriet Hector "
    "Helga Hugo Ida Ignatius Irma Ivor Jasper Josefa Judith Julius Klara Konrad Lavinia Leander "
    "Linus Lotte Magnus Marta Matilda Maurice Nadia Nestor Octavia Orson Ottilie Pascal Petra "
    "Quentin Ramona Roland Rosalind Rufus Sabine Selma Stefan Sylvia Tabitha Theodor Thora Ulrich "
    "Ursula Valentin Vera Viktor Wanda Wilfred Winifred Xaver Yvonne Zelda"
)
_LAST_NAMES = _list(
    "Albrecht Ambrose Ashdown Barlow Beckett Birkeland Blackwood Brandt Calloway Carrick Castellan "
    "Corbett Dalgaard Delacroix Drummond Eastwood Ellery Engstrom Fairfax Falkner Fenwick Garrick "
    "Gellner Goodwin Hallam Hartmann Hawtrey Ibbotson Ingram Jardine Jellicoe Kessler Kingsley "
    "Kovacs Lambert Larkin Lindgren Lockwood Mallory Marchbank Merrick Mortimer Nansen Norwood "
    "Oakley Osborne Overton Pargeter Pemberton Prescott Quayle Radcliffe Redfern Rosenthal "
    "Sandoval Selwyn Sheffield Stanhope Tamsin Thackeray Thornton Underhill Vandermeer Vickers "
    "Wakefield Wendell Whitlock Winslow Wyndham Yardley Zimmer"
)
_STEMS = _list(
    "Ald Bel Bram Carn Cor Dal Dren Eld Esk Fal Fern Gar Glen Hal Harn Hol Ist Jor Kel Kirn Lan "
    "Lor Mar Mel Mor Nar Nev Ol Orm Pel Pen Quen Ral Ros Sal Sel Stav Tal Tam Tor Ul Ur Val Vel "
    "Ves Wal Wen Win Yar Zel"
)
_MIDDLES = ("a", "e", "i", "o", "an", "en", "in", "or", "un", "er")
_TOWN_ENDINGS = (
    "burgh",
    "bury",
    "dale",
    "field",
    "ford",
    "gate",
    "ham",
    "haven",
    "holm",
    "mouth",
    "stead",
    "thorpe",
    "ton",
    "wick",
)
_RIVER_ENDINGS = (
    "bach",
    "beck",
    "dra",
    "gris",
    "lune",
    "mere",
    "nith",
    "quel",
    "rith",
    "sava",
    "tyne",
    "vane",
    "xa",
)
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"
_DOCUMENTATION_PAGES = 100  # more than there are: then they repeat
_DOCUMENTATION_WORD = re.compile(r"(?<![\w'-])[a-z]{4,10}(?![\w'-])")


def keys(rng: random.Random) -> Iterator[str]:
    """RULER's keys, "mellow-lantern"."""
    return _pair(rng, _QUALITIES, _OBJECTS, "-")


def people(rng: random.Random) -> Iterator[str]:
    """First and last names that the calibration texts do not have."""
    return _pair(rng, _FIRST_NAMES, _LAST_NAMES, " ")


def towns(rng: random.Random) -> Iterator[str]:
    """Towns that do not exist."""
    return _pair(rng, [a + b for a in _STEMS for b in _MIDDLES], _TOWN_ENDINGS, "")


def rivers(rng: random.Random) -> Iterator[str]:
    """Rivers that do not exist."""
    return _pair(rng, [a + b for a in _STEMS for b in _MIDDLES], _RIVER_ENDINGS, "")


def english(rng: random.Random) -> Iterator[str]:
    """Single words of Python's documentation, some 2,000, then pairs of them written as one."""
    pages = itertools.islice(topics(random.Random(0)), _DOCUMENTATION_PAGES)
    known = sorted(set(_DOCUMENTATION_WORD.findall("\n".join(pages))))
    yield from rng.sample(known, len(known))
    pairs = _distinct(lambda: rng.choice(known) + rng.choice(known))
    yield from (word for word in pairs if word not in known)


def draw_coded_words(rng: random.Random) -> Iterator[str]:
    """RULER's coded words, six letters."""
    return _distinct(lambda: "".join(rng.choices(string.ascii_lowercase, k=6)))


def labels(rng: random.Random) -> Iterator[str]:
    """Invented words that can be pronounced, such as "dapomi"."""
    return _distinct(
        lambda: "".join(rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(3))
    )


def variables(rng: random.Random) -> Iterator[str]:
    """RULER's variables, five capital letters."""
    return _distinct(lambda: "".join(rng.choices(string.ascii_uppercase, k=5)))


def numbers(rng: random.Random, digits: int) -> Iterator[str]:
    """Numbers of `digits` digits."""
    return _distinct(lambda: str(rng.randrange(10 ** (digits - 1), 10**digits)))


def uuids(rng: random.Random) -> Iterator[str]:
    """Random UUIDs."""
    return _distinct(lambda: str(uuid.UUID(int=rng.getrandbits(128), version=4)))


def characters(rng: random.Random, length: int) -> Iterator[str]:
    """Strings of small letters and digits."""
    return _distinct(lambda: "".join(rng.choices(string.ascii_lowercase + string.digits, k=length)))


def take(supply: Iterator[str], count: int) -> list[str]:
    """The next `count` of a supply."""
    return list(itertools.islice(supply, count))


def _distinct(make: Callable[[], str]) -> Iterator[str]:
    seen: set[str] = set()
    while True:
        if (made := make()) not in seen:
            seen.add(made)
            yield made


def _pair(
    rng: random.Random, firsts: Sequence[str], seconds: Sequence[str], between: str
) -> Iterator[str]:
    """All pairs in a random order; when they are used up, triples."""
    order = rng.sample(range(len(firsts) * len(seconds)), len(firsts) * len(seconds))
    pairs = (
        firsts[index // len(seconds)] + between + seconds[index % len(seconds)] for index in order
    )
    seen: set[str] = set()
    for pair in pairs:
        if pair not in seen:
            seen.add(pair)
            yield pair
    yield from _distinct(
        lambda: between.join((rng.choice(firsts), rng.choice(firsts), rng.choice(seconds)))
    )
