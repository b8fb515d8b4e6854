"""`tangram chat` and `tangram generate` as somebody at a terminal, or a pipe, has them: the
embedded model.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from .test_process import ROOT

START_S, ANSWER_S = 180.0, 60.0
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|[\x01\x02\r]")


class Typed:
    """A process on a terminal of 200 columns; `said` is what it has written so far, without
    colours.
    """

    def __init__(self, process: subprocess.Popen[bytes], terminal: int) -> None:
        self.process, self._terminal, self._raw = process, terminal, b""
        self._seen = 0

    @property
    def said(self) -> str:
        return _ESCAPES.sub("", self._raw.decode(errors="replace"))

    def enter(self, line: str) -> None:
        os.write(self._terminal, line.encode() + b"\n")

    def interrupt(self, heard: Callable[[], bool]) -> None:
        """Press Ctrl-C until it is heard: one between a prompt and readline's waiting is noted at
        the next key.
        """
        for _ in range(20):
            self.process.send_signal(signal.SIGINT)
            deadline_s = time.monotonic() + 2
            while time.monotonic() < deadline_s:
                if heard():
                    return
                self._read(0.1)
        pytest.fail(f"Ctrl-C is not heard: {self.said[self._seen :]!r}")

    def expect(self, pattern: str, timeout_s: float = ANSWER_S) -> str:
        """Read on until `pattern` comes behind what was expected before."""
        deadline_s = time.monotonic() + timeout_s
        while (found := re.compile(pattern).search(self.said, self._seen)) is None:
            left_s = deadline_s - time.monotonic()
            if left_s < 0 or not self._read(left_s):
                pytest.fail(f"{pattern!r} did not come: {self.said[self._seen :]!r}")
        self._seen = found.end()
        return found[0]

    def _read(self, timeout_s: float) -> bool:
        if not select.select([self._terminal], [], [], timeout_s)[0]:
            return True
        try:
            new = os.read(self._terminal, 65536)
        except OSError:  # the other end is closed
            return False
        self._raw += new
        return bool(new)


@contextmanager
def chat(variables: Mapping[str, str], *options: str) -> Iterator[Typed]:
    terminal, other = pty.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))
    command = [
        sys.executable,
        "-m",
        "tangram",
        "chat",
        "smollm2",
        "--kv-cache-gib",
        "0.3",
        *options,
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TERM": "xterm"} | variables
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=other,
        stdout=other,
        stderr=other,
        env=environment,
        start_new_session=True,
    )
    os.close(other)
    try:
        yield Typed(process, terminal)
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


def test_somebody_talks_stops_an_answer_and_ends(tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("The cable was laid in 1866 by Captain Anderson of the Great Eastern. " * 40)
    with chat({"XDG_STATE_HOME": str(tmp_path)}, "--max-tokens", "400") as talk:
        talk.expect("you  ", START_S)
        talk.enter("Count from one to two hundred, in words.")
        talk.expect("in words.\n")
        # It streams: there are words before the answer has ended
        talk.expect("[A-Za-z]{3,}[^·]{20,}")
        talk.process.send_signal(signal.SIGINT)
        talk.expect(r"stopped · reused 0 of \d+ tokens · .* · KV .* MiB, nothing to compress yet")
        talk.expect("you  ")
        talk.enter("/retention 1.0")
        talk.expect("answers are computed at kv_retention 1\n")
        talk.enter("/retention 0.33")
        talk.expect("error: kv_retention is 0.33, .* choose one")
        talk.enter("/file /nowhere.txt")
        talk.expect("error: file '/nowhere.txt' is not there\n")
        talk.enter("/clear")
        talk.enter("/retention 0.5")
        talk.enter(f"/file {notes}")
        talk.expect(r"notes.txt, [\d,]+ tokens, goes before your next question\n")
        talk.enter("Who laid \\")
        talk.enter("the cable? One word.")
        talk.expect(
            r"reused .* · KV .* MiB, \d+% of uncompressed \(ρ 0.5, the newest \d+ tokens are "
            r"whole\)"
        )
        talk.expect("you  ")
        talk.interrupt(lambda: "Ctrl-C again ends" in talk.said)
        talk.interrupt(lambda: talk.process.poll() is not None)
        assert talk.process.wait(timeout=30) == 0
        assert "Traceback" not in talk.said
    kept = tmp_path / "tangram" / "chat_history"
    assert "/retention 1.0" in kept.read_text() and kept.stat().st_mode & 0o077 == 0


def pipe(
    python: list[str], *command: str, given: bytes, **variables: str
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*python, "-m", "tangram", *command],
        cwd=ROOT,
        input=given,
        capture_output=True,
        timeout=START_S,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | variables,
        check=False,
    )


def test_a_conversation_in_a_pipe(python: list[str]) -> None:
    ended = pipe(
        python,
        "chat",
        "--temperature",
        "0",
        "--max-tokens",
        "4",
        given=b"/system Be brief.\nHello\n/exit\nnever asked\n",
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count(b"\n") == 1 and b"you" not in ended.stdout
    assert b"reused 0 of " in ended.stderr and b"cut at 4 tokens" in ended.stderr


@pytest.mark.parametrize("given", [pytest.param(b"", marks=pytest.mark.nightly), b"Hello"])
def test_the_end_of_a_pipe_ends_a_conversation_well(python: list[str], given: bytes) -> None:
    ended = pipe(python, "chat", "--max-tokens", "4", given=given)
    assert ended.returncode == 0, ended.stderr
    assert bool(ended.stdout) == bool(given) and b"Traceback" not in ended.stderr


def test_a_line_that_is_no_text_spoils_no_other(python: list[str]) -> None:
    ended = pipe(python, "chat", "--max-tokens", "4", given=b"H\xff\nHello\n")
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count(b"error: line has bytes that are not UTF-8") == 1
    assert ended.stdout.count(b"\n") == 1 and b"cut at 4 tokens" in ended.stderr


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize(
    "variables",
    [
        pytest.param({"LC_ALL": "C"}, marks=pytest.mark.nightly, id="C"),
        pytest.param(ASCII, id="ASCII"),
    ],
)
def test_any_locale_takes_and_gives_texts(python: list[str], variables: dict[str, str]) -> None:
    """What an ASCII terminal cannot show is escaped. The same text is asked for, by the argument
    and the pipe.
    """
    prompt = "Zürich, Genève, Köln, Zürich, Genève,"
    options = ("--max-tokens", "4")
    by_pipe = pipe(python, "generate", *options, given=prompt.encode(), **variables)
    by_argument = pipe(python, "generate", *options, "-p", prompt, given=b"", **variables)
    assert by_pipe.returncode == by_argument.returncode == 0, by_pipe.stderr + by_argument.stderr
    assert by_pipe.stdout == by_argument.stdout
    assert ("K\\xf6l" if variables == ASCII else "Köl").encode() in by_pipe.stdout


def test_an_argument_that_is_no_text_is_one_line(python: list[str]) -> None:
    ended = pipe(python, "generate", "-p", "H\udcff", given=b"")
    assert ended.returncode == 2
    assert ended.stderr == b"error: prompt is no text, it has bytes that are not UTF-8: give one\n"


@pytest.mark.parametrize("options", [[], pytest.param(["-p", "-"], marks=pytest.mark.nightly)])
def test_generate_reads_a_pipe_and_its_output_is_the_text_alone(
    python: list[str], options: list[str]
) -> None:
    given = b"The days of the week are Monday, Tuesday, Wednesday,\n"
    ended = pipe(python, "generate", "--max-tokens", "40", *options, given=given)
    assert ended.returncode == 0, ended.stderr
    text = ended.stdout.decode()
    assert text.startswith(" Thursday, Friday, Saturday") and text.endswith("\n")
    assert max(map(len, text.splitlines())) > 80, "lines are broken"
    assert b"nothing to compress yet" in ended.stderr


@pytest.mark.parametrize(
    ("given", "why"), [(b"\n", b"standard input is empty"), (b"\xff", b"no text in UTF-8")]
)
def test_a_pipe_without_text_is_one_line(python: list[str], given: bytes, why: bytes) -> None:
    ended = pipe(python, "generate", given=given)
    assert ended.returncode == 2 and why in ended.stderr
    assert ended.stderr.count(b"\n") == 1 and not ended.stdout
