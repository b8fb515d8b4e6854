"""Reads files in LoCoMo's format: sessions of dated turns, and questions with their evidence."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, TypeAdapter, ValidationError

from tangram.errors import ConfigError
from tangram.foreign_files import parse_json, read_text

# The dataset writes years as numbers.
Text = Annotated[
    str, BeforeValidator(lambda value: str(value) if isinstance(value, int | float) else value)
]

_SESSION = re.compile(r"session_(\d+)")
_TURN_ID = re.compile(r"D:?(\d+):(\d+)")


class Turn(BaseModel):
    """One utterance of a speaker; `blip_caption` describes a photo that is shown with it."""

    speaker: str
    dia_id: str
    text: str
    blip_caption: str | None = None

    def line(self) -> str:
        """The turn as it stands in a context, and as LoCoMo's own evaluation writes it."""
        photo = f" and shared {self.blip_caption}." if self.blip_caption else ""
        return f'{self.speaker} said, "{self.text}"{photo}'


class AskedQuestion(BaseModel):
    """A question of the dataset.

    Categories: 1 multi-hop, 2 temporal, 3 open-domain, 4 single-hop, 5 adversarial.
    """

    question: str
    category: Literal[1, 2, 3, 4, 5]
    evidence: list[str] = []
    answer: Text | None = None
    adversarial_answer: Text | None = None

    def turn_ids(self) -> tuple[str, ...]:
        """The ids of turns, "D3:12" each. A string with several ids ("D8:6; D9:17") is split."""
        found = _TURN_ID.findall(" ".join(self.evidence))
        return tuple(dict.fromkeys(f"D{int(session)}:{int(turn)}" for session, turn in found))


@dataclass(frozen=True)
class Session:
    """The turns of one session, and its date as the file words it."""

    date: str
    turns: tuple[Turn, ...]

    def text(self) -> str:
        """The date and the turns, a line each."""
        return "\n".join(
            [f"DATE: {self.date}", "CONVERSATION:", *(turn.line() for turn in self.turns)]
        )


@dataclass(frozen=True)
class Conversation:
    """The sessions of two speakers, in order, and the questions about them; `name` is its id."""

    name: str
    speakers: tuple[str, str]
    sessions: tuple[Session, ...]
    asked: tuple[AskedQuestion, ...]


def read_conversations(path: Path) -> list[Conversation]:
    """All conversations of a file, or of a folder's `*.json` in order of names.

    A file holds one conversation or a list of them. Sessions stand beside "qa" or under
    "conversation". Raises `ConfigError` (field `path`) if there is no such file, or if it has not
    LoCoMo's format.
    """
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files:
        raise ConfigError(
            f"path is {path}, a folder without *.json: name a LoCoMo file or a folder of them"
        )
    return [conversation for file in files for conversation in _of_file(file)]


def _of_file(file: Path) -> list[Conversation]:
    try:
        content = parse_json(read_text(file))
    except OSError as error:
        raise ConfigError(
            f"path: {file} cannot be read ({error.strerror}): name a LoCoMo file"
        ) from error
    except ValueError as error:
        raise ConfigError(f"path: {file} is not JSON ({error}): name a LoCoMo file") from error
    documents = content if isinstance(content, list) else [content]
    try:
        return [
            _conversation(file.stem, number, document) for number, document in enumerate(documents)
        ]
    except (ValidationError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"path: {file} does not have the form of a LoCoMo conversation: {error}"
        ) from error


def _conversation(stem: str, number: int, document: dict[str, Any]) -> Conversation:
    sessions = document.get("conversation", document)
    numbers = sorted(int(match[1]) for key in sessions if (match := _SESSION.fullmatch(key)))
    return Conversation(
        name=str(document.get("sample_id", f"{stem}-{number}" if number else stem)),
        speakers=(sessions["speaker_a"], sessions["speaker_b"]),
        sessions=tuple(
            Session(
                sessions[f"session_{one}_date_time"],
                TypeAdapter(tuple[Turn, ...]).validate_python(sessions[f"session_{one}"]),
            )
            for one in numbers
            if sessions[f"session_{one}"]
        ),
        asked=TypeAdapter(tuple[AskedQuestion, ...]).validate_python(document["qa"]),
    )
