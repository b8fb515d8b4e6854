"""Questions about functions of Python's standard library, after SCBench's code tasks.

They are in arXiv 2412.10319.
"""

from __future__ import annotations

import ast
import itertools
import random
import re
import sysconfig
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tangram.calibrate.texts import topics
from tangram.errors import ConfigError
from tangram_lab.accuracy.budget import Budget, Stock
from tangram_lab.accuracy.sample import Draft, Question

_ASKED = 4
_LINES = range(3, 31)
_SOURCE_CHARACTERS = 1_000
_ANSWER_CHARACTERS = range(8, 81)  # an answer of this length is not written by chance
_REPLY_TOKENS = 64
_HEAD = (
    "Below is source code of Python's standard library. You will be asked about its functions.\n\n"
)
_ASKS = {
    "signature": (
        "Write the name and the parameters of the function {name} as its definition has "
        "them. Answer:\ndef"
    ),
    "docstring": "What is the first line of the docstring of the function {name}? Answer:",
    "returned": "Which expression does the function {name} return? Answer:\nreturn",
}


@dataclass(frozen=True)
class SourceFunction:
    """A function or method as its file has it, without indentation.

    `answers` maps what can be asked about it to the answer.
    """

    name: str
    source: str
    answers: dict[str, str]


# A line of the context, and the function that ends there.
Line = tuple[str, SourceFunction | None]


def code_lookup(rng: random.Random, budget: Budget) -> Draft:
    """Short functions file by file up to the budget; questions about up to four of them.

    A question asks for a signature, the first line of a docstring, or the returned expression. Its
    function is there in full, and its name is defined once. Raises `ConfigError` where Python comes
    without its sources.
    """
    asking = random.Random(rng.getrandbits(64))
    lines = Stock(itertools.chain(_lines(rng), _padding(asking)))

    def write(count: int) -> str:
        return _HEAD + "".join(f"{line}\n" for line, _ in lines.first(count)) + "\n"

    fewest = next(count for count in itertools.count(1) if lines.first(count)[-1][1] is not None)
    count = budget.fill(write, fewest=fewest)
    text = write(count)
    whole = [function for _, function in lines.first(count) if function is not None]
    definitions = Counter(re.findall(r"\bdef (\w+)\(", text))
    once = [function for function in whole if definitions[function.name] == 1]
    asked = asking.sample(once, min(_ASKED, len(once)))
    return Draft(text, tuple(_question(asking, function) for function in asked))


def _question(rng: random.Random, function: SourceFunction) -> Question:
    kind = rng.choice(sorted(function.answers))
    ask = _ASKS[kind].format(name=function.name)
    return Question(ask, (function.answers[kind],), "code", _REPLY_TOKENS, (function.source,))


def _lines(rng: random.Random) -> Iterator[Line]:
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    if not paths:
        raise ConfigError(
            "task code_lookup reads the standard library's sources, and "
            f"{sysconfig.get_path('stdlib')} has none: install them or take another suite"
        )
    rng.shuffle(paths)
    seen: set[str] = set()
    for path in paths:
        functions = [function for function in _functions(path) if function.name not in seen]
        for function in {function.name: function for function in functions}.values():
            seen.add(function.name)
            *before, last = function.source.split("\n")
            yield from ((line, None) for line in [f"# {path.name}", *before])
            yield last, function
            yield "", None


def _padding(rng: random.Random) -> Iterator[Line]:
    """The text after all functions: the language's documentation, as comments."""
    return ((f"# {line}", None) for page in topics(rng) for line in page.splitlines())


def _functions(path: Path) -> Iterator[SourceFunction]:
    """The module's short functions and methods that a question can be about."""
    text = path.read_text(encoding="utf-8", errors="replace")
    rows = text.split("\n")
    for node in _definitions(ast.parse(text)):
        own = rows[node.lineno - 1 : node.end_lineno]
        source = textwrap.dedent("\n".join(own)).expandtabs(4)
        answers = {kind: answer for kind, answer in _answers(node) if _can_be_asked(answer, source)}
        if answers and len(own) in _LINES and len(source) <= _SOURCE_CHARACTERS:
            yield SourceFunction(node.name, source, answers)


def _definitions(module: ast.Module) -> Iterator[ast.FunctionDef]:
    for node in module.body:
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        yield from (
            one
            for one in inside
            if isinstance(one, ast.FunctionDef) and not one.name.startswith("__")
        )


def _answers(node: ast.FunctionDef) -> Iterator[tuple[str, str]]:
    if node.args.args and node.args.args[-1].arg not in ("self", "cls"):
        yield "signature", f"{node.name}({ast.unparse(node.args)})"
    if docstring := ast.get_docstring(node):
        yield "docstring", docstring.split("\n")[0].strip().rstrip(".")
    returned = [
        one.value for one in ast.walk(node) if isinstance(one, ast.Return) and one.value is not None
    ]
    if len(returned) == 1:
        yield "returned", ast.unparse(returned[0])


def _can_be_asked(answer: str, source: str) -> bool:
    """Whether the answer is one line of a suitable length that occurs once in the source."""
    return len(answer) in _ANSWER_CHARACTERS and "\n" not in answer and source.count(answer) == 1
