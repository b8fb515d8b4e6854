"""What `.ci/run` does with Chromium, which tests of the page need."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INSTALLS = 'printf "#!/bin/sh\\n" > "$(dirname "$0")/chromium"; chmod +x "$(dirname "$0")/chromium"'


def run_ci(folder: Path, apt_get: str) -> tuple[int, list[str], str]:
    """`.ci/run` where nothing is installed; make only notes its targets, apt-get does `apt_get`.

    Returns the exit code, what make was asked for, and the messages.
    """
    shutil.copytree(ROOT / ".ci", folder / ".ci")
    programs = folder / "bin"
    programs.mkdir()
    for name in ("bash", "sh", "env", "dirname", "chmod"):
        (programs / name).symlink_to(str(shutil.which(name)))
    asked = folder / "asked"
    scripts = {"make": f'echo "$*" >> {asked}', "apt-get": apt_get, "timeout": 'shift; "$@"'}
    for name, script in scripts.items():
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(0o755)
    ended = subprocess.run(
        [folder / ".ci" / "run"],
        env={"PATH": str(programs)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return ended.returncode, asked.read_text().splitlines(), ended.stderr


@pytest.mark.parametrize("apt_get", ["exit 100", "exit 0"], ids=["fails", "installs nothing"])
def test_without_chromium_it_fails_and_says_why(tmp_path: Path, apt_get: str) -> None:
    code, asked, messages = run_ci(tmp_path, apt_get)
    assert code == 1 and "apt-get could not install chromium" in messages
    assert "laws" not in asked


def test_with_chromium_all_runs(tmp_path: Path) -> None:
    code, asked, _ = run_ci(tmp_path, f'[ "$1" = update ] || {{ {INSTALLS}; }}')
    assert code == 0 and asked[1:] == ["laws", "plugin-test", "eval-quick"]
