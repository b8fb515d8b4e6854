"""Where published figures come from: `python -m bench.published` lists the raw files by age.

The age of a raw file is the number of commits since the one that it was measured at. Speeds belong
to the code: at `MOST_COMMITS` they are measured again, or leave the page with their file. The
command of a raw file stands in it. `tests/docs/test_published_commits.py` holds these laws.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from bench.render.page import RESULTS

ROOT = Path(__file__).parents[1]
MOST_COMMITS = 600
# Of 7 to 12 digits, at least one a letter and one a number; or whatever follows the word.
_CITED = re.compile(
    r"\bcommits? (?P<named>[0-9a-f]{7,12})\b"
    r"|(?<![\w/.-])(?=[0-9]*[a-f])(?=[a-f]*[0-9])(?P<bare>[0-9a-f]{7,12})(?![\w/-])"
)


@dataclass(frozen=True)
class RawFile:
    """A file of bench/results."""

    path: Path

    @property
    def name(self) -> str:
        """Without its suffix, as templates name it."""
        return self.path.stem

    @cached_property
    def content(self) -> Any:
        """What was measured."""
        return json.loads(self.path.read_text(encoding="utf-8"))

    @property
    def commits(self) -> list[str]:
        """The commits it names, each once; one with uncommitted changes ends with "+"."""
        return list(dict.fromkeys(_find("commit", self.content)))

    @property
    def commands(self) -> list[str]:
        """The commands it names, each once."""
        return list(dict.fromkeys(_find("command", self.content)))

    @property
    def age(self) -> int:
        """The commits since its oldest one; all of them where it names none."""
        counts = [count_commits_since(commit.rstrip("+")) for commit in self.commits]
        return max(counts, default=count_commits())


def _find(key: str, content: Any) -> Iterator[str]:
    if isinstance(content, dict):
        for name, value in content.items():
            if name == key and isinstance(value, str):
                yield value
            else:
                yield from _find(key, value)
    elif isinstance(content, list):
        for value in content:
            yield from _find(key, value)


def raw_files() -> list[RawFile]:
    """All raw files, by name."""
    return [RawFile(path) for path in sorted(RESULTS.glob("*.json"))]


def cited_commits(text: str) -> set[str]:
    """The commits that a text names."""
    return {match["named"] or match["bare"] for match in _CITED.finditer(text)}


def has_history() -> bool:
    """False where the sources lie without git, or with the newest commits only."""
    return _git("rev-parse", "--is-shallow-repository") == "false"


@cache
def count_commits_since(commit: str) -> int:
    """The commits between `commit` and HEAD. Raises `KeyError` if it does not lead to HEAD."""
    if _git("merge-base", "--is-ancestor", f"{commit}^{{commit}}", "HEAD") is None:
        raise KeyError(commit)
    return int(_git("rev-list", "--count", f"{commit}..HEAD") or 0)


def count_commits() -> int:
    """The commits up to HEAD."""
    return int(_git("rev-list", "--count", "HEAD") or 0)


def _git(*arguments: str) -> str | None:
    """What git prints; None if it fails or is not there."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def main() -> None:
    """Print a line a raw file, the oldest first."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--commands", action="store_true", help="also print how to measure each")
    options = parser.parse_args()
    for file in sorted(raw_files(), key=lambda file: -file.age):
        print(f"{file.age:5} {file.name:36} {', '.join(file.commits) or 'names no commit'}")
        if options.commands:
            print("".join(f"      {command}\n" for command in file.commands), end="")


if __name__ == "__main__":
    main()
