"""What an agent may do in its folder. `llm` reads this file, and task.py gives it to others."""

import subprocess
import sys
from pathlib import Path


def read_file(path: str) -> str:
    """Read a file."""
    return Path(path).read_text()


def edit_file(path: str, old: str, new: str) -> str:
    """Replace a text of a file."""
    Path(path).write_text(Path(path).read_text().replace(old, new))
    return "edited"


def run_test(path: str) -> str:
    """Run a test file."""
    ended = subprocess.run([sys.executable, path], capture_output=True, text=True, check=False)
    return ended.stdout + ended.stderr
