"""Tasks for one conversation at a time: edit a file, quote a document, write freely.

The embedded model is too small to begin an edit or a quotation by itself. So the prompt has the
first words of the answer, as with a client that prefills an answer, and the model goes on.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from bench.logbook import LOGBOOK
from bench.speculation.runs import Prompt
from tangram.engine.text.codec import TextCodec

ROOT = Path(__file__).parents[2]
_SMALLEST, _LARGEST = 900, 2200  # characters of a file to edit
_TOPICS = (
    "Write a story about a lighthouse and a storm.",
    "Explain why people should sleep enough.",
    "Describe a walk through an old city in autumn.",
    "Write a letter to a friend who has moved to another country.",
    "What makes a good teacher?",
    "Tell the history of bread.",
)


@dataclass(frozen=True)
class WritingTask:
    """A prompt, the most tokens to answer with, and the text that a right answer copies from."""

    prompt: Prompt
    output_tokens: int
    source: tuple[int, ...]


def edit_file(codec: TextCodec, number: int, most_tokens: int) -> WritingTask:
    """Rename a function or class in a file of this repository."""
    files = _files()
    text = files[7 * number % len(files)].read_text(encoding="utf-8")
    name = _first_name(text)
    ask = f"```python\n{text}```\n\nRename `{name}` to `new_{name}` and write the whole file again."
    head = "".join(text.splitlines(keepends=True)[:3])
    begin, rest = f"Here is the whole file:\n\n```python\n{head}", text[len(head) :]
    return _task(codec, ask, begin, rest, most_tokens)


def quote_document(codec: TextCodec, number: int, most_tokens: int) -> WritingTask:
    """Quote a section of a document of 3,000 tokens."""
    document = LOGBOOK.read_text(encoding="utf-8")
    sections = re.split(r"^## ", document, flags=re.MULTILINE)[1:]
    title, body = sections[number % len(sections)].split("\n", 1)
    ask = f'{document}\n\nQuote the section "{title}" of the document above, word for word.'
    head = " ".join(body.split(" ")[:8])
    return _task(codec, ask, f"## {title}\n{head}", body[len(head) :], most_tokens)


def write_freely(codec: TextCodec, number: int, most_tokens: int) -> WritingTask:
    """Write about a topic, with nothing to copy from."""
    ask = _TOPICS[number % len(_TOPICS)]
    prompt = codec.chat_prompt([{"role": "user", "content": ask}])
    return WritingTask(prompt, most_tokens, ())


TASKS: Mapping[str, Callable[[TextCodec, int, int], WritingTask]] = {
    "edit": edit_file,
    "quote": quote_document,
    "prose": write_freely,
}


def _task(codec: TextCodec, ask: str, begin: str, rest: str, most_tokens: int) -> WritingTask:
    prompt = codec.chat_prompt([{"role": "user", "content": ask}])
    source = tuple(codec.tokenizer.encode(rest))
    begun = tuple(codec.tokenizer.encode(begin))
    return WritingTask(prompt + begun, min(most_tokens, len(source)), source)


@cache
def _files() -> list[Path]:
    paths = sorted((ROOT / "tangram").rglob("*.py"))
    sizes = {path: len(path.read_text(encoding="utf-8")) for path in paths}
    fitting = [path for path in paths if _SMALLEST < sizes[path] < _LARGEST]
    return [path for path in fitting if _first_name(path.read_text(encoding="utf-8"))]


def _first_name(text: str) -> str:
    """The first function or class of a file; empty if it has none."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    return next((node.name for node in ast.parse(text).body if isinstance(node, kinds)), "")
