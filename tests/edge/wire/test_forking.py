"""A fork that stands for a start: what a test sees of it is what it would see of a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from .conftest import wait_until

LASTING = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"


def python_started(python: list[str], code: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*python, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | variables,
    )


def is_running(process: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(process, 0)
        return True
    return False


@pytest.mark.parametrize(
    "code",
    [
        "import sys; print(sys.argv, __name__, sys.path[0] == ''); sys.exit(3)",
        "import atexit; atexit.register(print, 'the end'); raise SystemExit('a word')",
        "import os, signal; os.kill(os.getpid(), signal.SIGABRT)",
        "import os; print(os.getcwd(), os.environ['PATH'], flush=True); os._exit(4)",
        "import sys; print([s.encoding + s.errors for s in (sys.stdin, sys.stdout, sys.stderr)])",
        "import sys; [print(s.line_buffering, s.write_through) for s in (sys.stdout, sys.stderr)]",
        "import threading, time; threading.Timer(0.1, print, ['a thread']).start()",
        "print(input()[::-1])",
    ],
)
def test_it_says_and_ends_as_a_process_does(python: list[str], code: str, tmp_path: Path) -> None:
    ended = [
        subprocess.run(
            [*start, "-c", code, "more"],
            cwd=tmp_path,
            input="given\n",
            capture_output=True,
            text=True,
        )
        for start in (python, [sys.executable])
    ]
    fork, real = [(each.returncode, each.stdout, each.stderr) for each in ended]
    assert fork == real


def test_it_has_imported_and_runs_a_module(python: list[str]) -> None:
    with python_started(python, "import sys; print('torch' in sys.modules)") as process:
        assert process.communicate()[0] == "True\n"
    version = [*python, "-m", "tangram", "--version"]
    assert subprocess.run(version, capture_output=True, text=True).stdout.startswith("tangram ")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_reaches_it(python: list[str], number: signal.Signals) -> None:
    code = (
        "import signal, sys, time\n"
        f"signal.signal({number:d}, lambda *_: sys.exit(7))\n"
        "print('ready', flush=True)\n"
        "while True:\n"
        "    time.sleep(0.1)  # a signal may come just before a sleep, and is then handled after it"
    )
    with python_started(python, code) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.wait(timeout=30) == 7


def test_a_signal_that_it_does_not_handle_ends_it(python: list[str]) -> None:
    with python_started(python, LASTING) as process:
        assert process.stdout is not None and process.stdout.readline()
        process.terminate()
        assert process.wait(timeout=30) == -signal.SIGTERM


def test_a_kill_ends_it(python: list[str]) -> None:
    with python_started(python, LASTING) as process:
        assert process.stdout is not None
        fork = int(process.stdout.readline())
        assert fork != process.pid and is_running(fork)
        process.kill()
        assert process.wait(timeout=30) == -signal.SIGKILL
        wait_until(lambda: not is_running(fork), "the fork still runs", 30)
        assert process.stdout.read() == "", "its streams are closed"


def test_a_variable_that_imports_read_makes_a_real_start(python: list[str]) -> None:
    code = "import sys; print('torch' in sys.modules, sys.stdout.encoding)"
    with python_started(python, code, PYTHONIOENCODING="ascii") as process:
        assert process.communicate()[0] == "False ascii\n"


def test_a_variable_that_a_command_reads_is_the_forks_alone(python: list[str]) -> None:
    code = "import os, sys; print('torch' in sys.modules, os.environ.get('TANGRAM_CACHE'))"
    with python_started(python, code, TANGRAM_CACHE="/nowhere") as process:
        assert process.communicate()[0] == "True /nowhere\n"
    with python_started(python, code) as process:
        assert process.communicate()[0] == f"True {os.environ.get('TANGRAM_CACHE')}\n"
