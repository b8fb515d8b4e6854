"""What a command says: foreign names letter by letter, errors in one line wherever nobody looks at
its width.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.table import Table
from typer.testing import CliRunner

from tangram.cli import app, console
from tangram.cli.telemetry import logging_as
from tangram.serve.observability.logs import LogForm

NAMES = ["[/x]", "[bold]x", "[red]y[/red]", ":smile:", "\\[/x]"]
COMMANDS = {
    "size": ["size", "NAME"],
    "size of a preset": ["size", "llama-3.1-8b", "--dtype", "NAME"],
    "model": ["generate", "NAME", "-p", "a"],
    "batch": ["generate", "--batch", "NAME", "-o", "out.json"],
    "output": ["eval", "-o", "nowhere/NAME"],
    "methods": ["eval", "--methods", "NAME"],
    "report": ["calibrate", "-o", "out.json", "--report", "NAME"],
    "data": ["calibrate", "-o", "out.json", "--data", "NAME"],
    "speed": ["bench", "serving", "trace", "--file", "a", "--speed", "NAME"],
    "host": ["serve", "--host", "NAME"],
    "allowed origin": ["serve", "--port", "0", "--allowed-origins", "NAME"],
    "choice": ["serve", "--scope", "NAME"],
    "option": ["serve", "--NAME"],
    "command": ["NAME"],
    "argument": ["size", "llama-3.1-8b", "NAME"],
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("coloured", [False, True])
def test_a_name_is_shown_letter_by_letter(
    command: str, name: str, coloured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FORCE_COLOR", "1") if coloured else monkeypatch.delenv(
        "FORCE_COLOR", raising=False
    )
    given = [word.replace("NAME", name) for word in COMMANDS[command]]
    result = CliRunner().invoke(app, given, env={"COLUMNS": None})
    assert result.exit_code == 2, result.exception
    assert name in result.stderr.replace("\\\\", "\\"), result.stderr


@pytest.mark.parametrize("name", NAMES)
def test_bars_tables_and_logs_show_names_letter_by_letter(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with console.progress() as bar:
        bar.add_task(name, total=1)
    with console.waiting(name):
        pass
    table = Table(name, title=name)
    table.add_row(name)
    console.output().print(table)
    console.output().print(name)
    console.tell(name)
    with logging_as(LogForm.text):
        logging.getLogger("tangram").warning("%s", name)
    told = capsys.readouterr()
    assert told.out.count(name) == 4 and told.err.count(name) >= 4


@pytest.mark.parametrize(
    "given",
    [
        ["size", "word " * 60],
        ["serve", "--there-is-no-such-option-" + "x" * 90],
        ["serve", "--port", "word " * 60],
        ["serve", "--pipeline-parallel-size", "4096"],
        ["word " * 60],
        ["calibrate", "-o", "word " * 30 + "/a.json"],
    ],
    ids=lambda given: given[0][:9],
)
def test_a_redirected_error_is_not_wrapped(given: list[str], tmp_path: Path) -> None:
    variables = {
        name: value for name, value in os.environ.items() if name not in ("COLUMNS", "FORCE_COLOR")
    }
    ended = subprocess.run(
        [sys.executable, "-m", "tangram", *given],
        cwd=tmp_path,
        env=variables | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 2 and not ended.stdout
    *usage, line = ended.stderr.splitlines()
    assert line.lower().startswith("error: ") and len(line) > 85
    assert [each.split()[0] for each in usage if each] in ([], ["Usage:", "Try"])


def test_a_redirected_log_is_not_wrapped(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    with logging_as(LogForm.text):
        logging.getLogger("tangram").warning("%s", "word " * 60)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.endswith("word " * 60)


def test_who_says_a_width_gets_a_box() -> None:
    result = CliRunner().invoke(app, ["serve", "--no-such"], env={"COLUMNS": "60"})
    assert "╭─ Error" in result.stderr and max(map(len, result.stderr.splitlines())) <= 60
