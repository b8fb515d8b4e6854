"""The messages of `tangram chat`, and the commands that change them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tangram.errors import RequestError
from tangram.foreign_files import expand_home

Message = dict[str, str]

COMMANDS = {
    "/help": "these lines",
    "/clear": "forget the conversation; the system text stays",
    "/system TEXT": "set the system text; without TEXT remove it",
    "/file PATH": "put a text file before your next question",
    "/retention RATIO": (
        "keep this fraction of KV entries from now on (1.0 keeps all), also with a scorer, as in "
        "0.5 keydiff; without RATIO print it"
    ),
    "/exit": "end, as Ctrl-D does",
}
KEYS = (
    'A \\ at the end of a line continues it; """ begins and ends a text of several lines.',
    "Ctrl-C stops an answer and keeps its beginning; Ctrl-C twice ends.",
)
_COMMAND = re.compile(r"(/[a-z]+)(?:\s+(.*))?", re.DOTALL)


@dataclass
class ChatHistory:
    """The messages so far, a system text, and documents that wait for the next question.

    `count` returns the number of tokens of a text. At most `most_tokens` fit; a file has at most
    `most_bytes`. `check` raises `RequestError` for a retention ratio, or its scorer, that is not
    served. `kv_retention` and `kv_scorer` None mean the default.
    """

    count: Callable[[str], int]
    check: Callable[[float, str | None], None]
    most_tokens: int
    most_bytes: int
    default_retention: float
    kv_retention: float | None = None
    kv_scorer: str | None = None
    system: str = ""
    turns: list[Message] = field(default_factory=list)
    documents: list[str] = field(default_factory=list)

    @property
    def retention(self) -> float:
        """The retention ratio of the next answer."""
        return self.default_retention if self.kv_retention is None else self.kv_retention

    def add_question(self, question: str) -> list[Message]:
        """All messages including `question`, preceded by the waiting documents."""
        head = [{"role": "system", "content": self.system}] if self.system else []
        content = "\n\n".join([*self.documents, question])
        return [*head, *self.turns, {"role": "user", "content": content}]

    def enter(self, question: str, answer: str) -> None:
        """Append a question and its answer, which may be incomplete."""
        self.turns = [
            *self.add_question(question)[bool(self.system) :],
            {"role": "assistant", "content": answer},
        ]
        self.documents = []

    def command(self, line: str) -> str | None:
        """Run a line such as "/clear" and return the message about it; None if it is no command.

        Raises `RequestError` if it fails; then nothing has changed.
        """
        found = _COMMAND.fullmatch(line.strip())
        if found is None:
            return None
        name, argument = found[1], (found[2] or "").strip()
        known = {usage.split()[0]: usage for usage in COMMANDS}
        if name not in known:
            raise RequestError(f"there is no {name}: /help lists the commands", "command")
        if argument and " " not in known[name]:
            raise RequestError(f"{name} takes nothing behind it", "command")
        message: str = getattr(self, f"_{name[1:]}")(argument)
        return message

    def _help(self, _: str) -> str:
        width = max(map(len, COMMANDS))
        return "\n".join([*(f"{usage:{width}}  {what}" for usage, what in COMMANDS.items()), *KEYS])

    def _clear(self, _: str) -> str:
        self.turns, self.documents = [], []
        return "the conversation is empty again"

    def _exit(self, _: str) -> str:
        raise EOFError

    def _system(self, text: str) -> str:
        self.system = text
        return "the system text is set" if text else "the system text is removed"

    def _retention(self, given: str) -> str:
        if given:
            ratio, _, scorer = given.partition(" ")
            try:
                wanted = float(ratio)
            except ValueError as error:
                message = f"kv_retention is {ratio!r}, it must be a number such as 0.5 or 1.0"
                raise RequestError(message, "kv_retention") from error
            self.check(wanted, scorer.strip() or None)
            self.kv_retention, self.kv_scorer = wanted, scorer.strip() or None
        scored = f" with scorer {self.kv_scorer}" if self.kv_scorer else ""
        return f"answers are computed at kv_retention {self.retention:g}{scored}"

    def _file(self, path: str) -> str:
        source = expand_home(path.strip("'\""))
        text = self._read(source)
        tokens = self.count(text)
        if tokens >= self.most_tokens:
            raise _unusable(
                source,
                f"has {tokens:,} tokens, a conversation must have fewer than {self.most_tokens:,}",
            )
        self.documents.append(f"[{source.name}]\n{text.strip()}")
        return f"{source.name}, {tokens:,} tokens, goes before your next question"

    def _read(self, source: Path) -> str:
        try:
            if not source.is_file():
                raise _unusable(source, "is a folder" if source.is_dir() else "is not there")
            if (size := source.stat().st_size) > self.most_bytes:
                most = self.most_tokens
                raise _unusable(
                    source, f"has {size:,} bytes, the context of {most:,} tokens cannot hold them"
                )
            text = source.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise _unusable(source, "is no text in UTF-8") from error
        except OSError as error:
            raise _unusable(source, f"cannot be read: {error.strerror}") from error
        if "\0" in text or not text.strip():
            raise _unusable(source, "is no text" if text.strip() else "is empty")
        return text


def _unusable(source: Path, why: str) -> RequestError:
    return RequestError(f"file {str(source)!r} {why}", "file")
