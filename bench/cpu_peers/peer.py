"""What every system of the comparison does, and its process: lines of JSON in, lines of JSON out.

A process runs in the system's own environment, which need not have torch. So this module imports
nothing but the requests and answers of a load.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from itertools import takewhile
from typing import Any, Protocol

from tangram_lab.load.asks import Ask
from tangram_lab.load.clock import TimedAnswer


class Peer(Protocol):
    """A system with its model loaded; `packages` are those whose versions are told."""

    packages: Sequence[str]

    def encode(self, text: str) -> list[int]:
        """The token ids of `text`, without special tokens."""
        ...

    def forget(self) -> None:
        """Drop every cached prefix."""
        ...

    def answer(self, asks: Sequence[Ask]) -> list[TimedAnswer]:
        """Answer all of `asks` at once, greedily and to the last token."""
        ...


def serve_peer(start: Callable[..., Peer]) -> None:
    """Start a peer with the options of the command line, and serve it until standard input ends.

    A line asks for the `ids` of a text, or for the `answers` to asks. The first reply, before any
    line, has the versions. What the system itself prints goes to standard error.
    """
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def reply(content: Any) -> None:
        print(json.dumps(content), file=replies, flush=True)

    peer = start(**json.loads(sys.argv[1]))
    reply({name: version(name) for name in peer.packages})
    for line in sys.stdin:
        asked = json.loads(line)
        if "text" in asked:
            reply(peer.encode(asked["text"]))
            continue
        if asked["forget"]:
            peer.forget()
        answers = peer.answer([read_ask(ask) for ask in asked["asks"]])
        reply([asdict(answer) for answer in answers])


def read_ask(fields: Mapping[str, Any]) -> Ask:
    """An ask as `asdict` and JSON have left it."""
    return Ask(tuple(fields["tokens"]), fields["output_tokens"], fields["at_s"])


def count_common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many first tokens of both are equal."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
