"""Writes the data and the recorded cases of /learn: `python -m tools.learn_page`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tools.learn_cases import cases
from tools.learn_data import data_files
from tools.learn_site import PAGE, ROOT

DATA = PAGE.parent / "data"
CASES = ROOT / "tests" / "fixtures" / "learn_cases.json"


def spell(content: Any) -> str:
    """One line for each value of the outermost object, so that changes are seen."""
    lines = (f"{json.dumps(name)}: {_line(value)}" for name, value in content.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def pages() -> dict[Path, str]:
    """The text of every file that this script writes."""
    found = {DATA / name: spell(content) for name, content in data_files().items()}
    return found | {CASES: spell(cases())}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
