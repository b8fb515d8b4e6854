"""Render chat templates in a separate process with little memory, which its own timer ends.

A template is a program of the model's makers. It may compute for ever or fill the memory, and a
thread cannot be stopped: one power of large integers keeps the whole interpreter waiting.

    python -P template_process.py     # jobs in, results out, each one line of JSON

It writes `READY` when it takes jobs, and ends with its standard input. A job that takes longer than
`MOST_S` ends it by SIGALRM. It imports nothing of Tangram, so that it is ready in a second.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment

if TYPE_CHECKING:
    from jinja2.parser import Parser

MOST_S = 5
MOST_BYTES = 1 << 30
MOST_CHARACTERS = 1 << 26  # of a rendered conversation
READY = b"ready\n"
_MOST_START_S = 120
_MOST_REASON_CHARACTERS = 1000
_ASKS = ("defined", "undefined", "default", "d")

Render = Callable[..., tuple[list[str], Any]]


class _Generation(Extension):
    """The tag with which some templates mark answers for training; its content is rendered."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own form)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_EXTENSIONS: tuple[type[Extension], ...] = (_Generation, loopcontrols)


def main() -> None:
    """Answer the jobs on standard input until its end."""
    signal.setitimer(signal.ITIMER_REAL, _MOST_START_S)
    results = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints is no result
    from transformers.utils.chat_template_utils import render_jinja_template

    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    signal.setitimer(signal.ITIMER_REAL, 0)
    results.write(READY)
    results.flush()
    for job in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_REAL, MOST_S)
        # It returns texts and indices, whatever its annotation says.
        result = _answer(job, cast("Render", render_jinja_template))
        signal.setitimer(signal.ITIMER_REAL, 0)
        results.write(result)
        results.flush()


def _answer(line: bytes, render: Render) -> bytes:
    """The result of a job as a line: `done`, or why it was `refused`; null of too much memory."""
    try:
        return json.dumps(_work(json.loads(line), render)).encode() + b"\n"
    except MemoryError:
        return b"null\n"


def _work(job: dict[str, Any], render: Render) -> dict[str, Any]:
    if "read" in job:
        return {"done": sorted(_read_variables(job["read"]))}
    try:
        texts, _ = render(**job["render"])
    except MemoryError:
        raise
    except TemplateError as error:
        return {"refused": f": {str(error)[:_MOST_REASON_CHARACTERS]}"}
    # What it does with messages that its makers did not think of is open.
    except Exception:
        return {"refused": ""}
    if len(texts[0]) > MOST_CHARACTERS:
        raise MemoryError
    return {"done": texts[0]}


def _read_variables(template: str) -> frozenset[str]:
    """The variables that `template` reads without writing them first."""
    environment = ImmutableSandboxedEnvironment(extensions=_EXTENSIONS)
    try:
        tree = environment.parse(template)
        read = find_undeclared_variables(tree)
    except (TemplateError, RecursionError):  # rendering a conversation reports it
        return frozenset()
    # Jinja counts variables that are set in one branch only; a default for a missing variable is
    # different.
    written = {name.name for name in tree.find_all(nodes.Name) if name.ctx == "store"}
    asked = {
        each.node.name
        for each in tree.find_all((nodes.Test, nodes.Filter))
        if each.name in _ASKS and isinstance(each.node, nodes.Name)
    }
    return frozenset(read - (written - asked))


if __name__ == "__main__":
    main()
