"""Rules of form that ruff does not know."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = [
    path
    for part in ("tangram", "lab", "plugins", "bench", "tools", "tests")
    for path in ROOT.glob(f"{part}/**/*.py")
]
MOST_LINES = 60
# A kernel of Triton is one function: its calls are inlined, and what they return is copied.
COMPILERS = {"triton.jit"}
# Their names stand for values.
NOUNS = {"property", "cached_property", "pytest.fixture"}
NOT_PARTICIPLES = {"embed", "feed", "seed", "speed"}
PARTICIPLES = {
    "begun",
    "bound",
    "built",
    "chosen",
    "done",
    "drawn",
    "driven",
    "found",
    "frozen",
    "given",
    "gone",
    "grown",
    "held",
    "kept",
    "known",
    "left",
    "lost",
    "made",
    "met",
    "paid",
    "seen",
    "sent",
    "shown",
    "shrunk",
    "sold",
    "spent",
    "stuck",
    "taken",
    "thrown",
    "told",
    "won",
    "written",
}
# File names that several folders have, by the reason why they mean the same there. Tests of one
# subject on a CPU, on a GPU or over the wire are named alike, too (`test_*.py`).
SHARED_NAMES = {
    "Python's, pytest's or our convention": "__init__ __main__ conftest make_fixture",
    "a command, and what it runs": "ablation naive replay",
    "a benchmark, and what it measures": "host_forms latents sealing",
    "a scorer, its kernel, and its command": "gate keydiff",
    "a subject, and what its tests share": "speculation templates",
    "the same of several commands or processes": "engines figures logs options serving",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def functions(path: Path) -> Iterator[Function]:
    for node in ast.walk(tree(path)):
        if isinstance(node, Function):
            yield node


def decorators(function: Function) -> set[str]:
    """Names of a function's decorators, without what they are called with."""
    called = [one.func if isinstance(one, ast.Call) else one for one in function.decorator_list]
    return {ast.unparse(one) for one in called}


def is_participle(name: str) -> bool:
    word = name.strip("_")
    return word in PARTICIPLES or (
        "_" not in word and word.endswith("ed") and word not in NOT_PARTICIPLES
    )


def test_functions_fit_on_a_screen() -> None:
    long = {
        f"{path.relative_to(ROOT)}: {one.name}": lines
        for path in FILES
        for one in functions(path)
        if (lines := one.end_lineno - one.lineno + 1) > MOST_LINES
        and not decorators(one) & COMPILERS
    }
    assert long == {}


def test_a_function_is_named_by_a_verb_or_by_what_it_returns() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {one.name}"
        for path in FILES
        for one in functions(path)
        if is_participle(one.name) and not decorators(one) & NOUNS
    ]
    assert wrong == []


def test_one_name_is_one_class() -> None:
    places = defaultdict(list)
    for path in FILES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_files_of_one_name_mean_the_same() -> None:
    places = Counter(path.stem for path in FILES if not path.stem.startswith("test_"))
    shared = {name for name, files in places.items() if files > 1}
    assert shared == set(" ".join(SHARED_NAMES.values()).split())


def test_the_formatter_has_no_exceptions() -> None:
    marks = ("# fmt" + ": skip", "# fmt" + ": off")
    assert [path for path in FILES if any(mark in path.read_text() for mark in marks)] == []
