"""What `bench.serving.stream_cost` measures beside this checkout, and in which order."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.serving.servers import KINDS, MeasuredServer
from bench.serving.stream_cost import checkout, make_table, measure_in_turns


def test_each_repeat_measures_all_and_no_checkout_always_comes_first() -> None:
    asked: list[Path] = []

    def run(root: Path) -> dict[str, Any]:
        asked.append(root)
        return {"run": len(asked)}

    found = measure_in_turns({"here": Path("a"), "before": Path("b")}, run, 3)
    assert asked == [Path(name) for name in ("a", "b", "b", "a", "a", "b")]
    assert [one["run"] for one in found["here"]] == [1, 4, 5]


def test_a_folder_is_measured_as_it_is_and_a_commit_from_its_files(tmp_path: Path) -> None:
    with checkout(str(tmp_path)) as found:
        assert found == tmp_path.resolve()
    with checkout("HEAD") as found:
        assert (found / "tangram" / "__main__.py").is_file()
    assert not found.exists() and tmp_path.exists()


def test_what_is_neither_a_folder_nor_a_commit_is_refused() -> None:
    with pytest.raises(SystemExit, match="no-such-one"), checkout("no-such-one"):
        pass


# A process that holds 40 MiB and has a child that is named as an API process is.
PARENT = """
import subprocess, sys
held = b"x" * (40 << 20)
child = ["-c", "print(flush=True); input()", "api_%s" % "process"]
subprocess.Popen([sys.executable, *child], stdin=sys.stdin).wait()
"""


def test_memory_and_the_processors_time_are_those_of_each_role() -> None:
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # the child has begun
        server = MeasuredServer(KINDS["tangram"], 0, process)
        held, used = server.memory_bytes(), server.cpu_seconds()
    assert 2**20 < held["api"] < 40 * 2**20 < held["engine"]
    assert used["engine"] > 0 and used.keys() == held.keys()


def test_api_processes_and_the_engines_stand_apart() -> None:
    run = {"api_us_a_token": 20.0, "engine_us_a_token": 300.0, "tokens_per_s": 9.0, "ttft_ms": 7.0}
    rows = [{"streams": 1, "of": "here", "runs": [run | {"memory_mib": {"api": 5, "engine": 40}}]}]
    cells = [next(iter(column.cells)) for column in make_table(rows).columns]
    assert [str(cell).split()[0] for cell in cells] == [
        "1",
        "here",
        "20",
        "300",
        "9",
        "7",
        "5",
        "40",
    ]
