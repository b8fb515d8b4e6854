"""Ctrl-C ends every command with one line, whatever it is at, and no end is followed by a list of
leaks.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .test_process import log_of, options, process
from .tiny import tiny_folder

ROOT = Path(__file__).parents[3]
# The command, with a part of its start that takes until somebody presses Ctrl-C, which happens at
# once.
INTERRUPTED = """
import importlib, os, signal, sys, time
where, name, *arguments = sys.argv[1:]
def endless(*args, **options):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
setattr(importlib.import_module(where), name, endless)
from tangram.__main__ import main
sys.argv = ["tangram", *arguments]
main()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize(
    ("where", "arguments"),
    [
        pytest.param(
            "tangram.model.load load_model",
            "calibrate FOLDER -o profile.json",
            marks=pytest.mark.nightly,
        ),
        ("tangram.engine.setup.build load_checked", "generate FOLDER --load-format dummy -p hello"),
        (
            "tangram.engine.setup.profiles calibrate_model",
            "serve FOLDER --load-format dummy --port 0",
        ),
        pytest.param(
            "tangram.kernels.cpu.compiled_attention warm_up",
            "chat FOLDER --load-format dummy --kv-retention 1.0 --kv-cache-gib 0.02",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_ctrl_c_during_the_start_is_one_line(
    where: str, arguments: str, folder: Path, tmp_path: Path, python: list[str]
) -> None:
    command = [*where.split(), *arguments.replace("FOLDER", str(folder)).split()]
    done = subprocess.run(
        [*python, "-c", INTERRUPTED, *command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"TANGRAM_CACHE": str(tmp_path)},
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 130, done.stderr
    assert done.stderr.splitlines()[-1] == "interrupted"
    assert "Traceback" not in done.stderr and "nanobind" not in done.stderr


def test_compiling_is_announced_and_can_be_interrupted(folder: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "tangram",
        "generate",
        str(folder),
        "--load-format",
        "dummy",
        "-p",
        "hello",
    ]
    command += ["--kv-retention", "1.0", "--kv-cache-gib", "0.02"]
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
    ) as started:
        assert started.stderr is not None
        said = ""
        for line in started.stderr:
            said += line
            if "compiling the CPU kernels" in line:
                break
        started.send_signal(signal.SIGINT)
        said += started.stderr.read()
        assert started.wait(timeout=60) == 130, said
    assert "compiling" in said
    assert said.splitlines()[-1] == "interrupted" and "Traceback" not in said


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)]
)
def test_a_server_ends_without_a_list_of_leaks(number: signal.Signals, folder: Path) -> None:
    with process("-m", "tangram", *options(folder, "--kv-retention", "1.0")) as (_, server):
        server.send_signal(number)
        assert server.wait(timeout=30) == 0
        said = log_of(server)
    assert "leaked" not in said and "Traceback" not in said
