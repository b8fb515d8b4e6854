"""Threads wait briefly where others want the cores, and long where nobody does."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tangram.engine.llm import LLM
from tangram.errors import ConfigError
from tangram.kernels.cpu.waiting import FREE_S, WINDOW_S, WaitPolicy

# How much processor time a process takes that hardly computes, with threads that wait long and with
# such that do not.
COST = """
import os, sys, threading, time
from pathlib import Path
import torch
from tangram.kernels.cpu.waiting import WaitPolicy
torch.set_num_threads(2)
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
task = Path(sys.argv[1]) / "1"
task.mkdir()
(task / "schedstat").write_text("0 0 0")
policy = WaitPolicy(Path(sys.argv[1]), environment={})
def cost():
    begin = time.process_time()
    for _ in range(200):
        torch.ones(1 << 17)
        time.sleep(0.002)
    return time.process_time() - begin
cost()
long = cost()
time.sleep(0.3)
(task / "schedstat").write_text("0 9000000000 0")
policy.adjust()
assert any(one.name == "tangram-team" for one in threading.enumerate())
time.sleep(0.5)
print(long / cost())
"""


class WaitingClock:
    """Seconds that pass when told to."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Machine:
    """What Linux would tell of one thread, and a policy that believes it."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self._stat, self._waited_ns, self._clock = folder / "7" / "schedstat", 0, WaitingClock()
        self._stat.parent.mkdir()
        self._pass(0.0, 0.0)
        self.policy, self._teams = WaitPolicy(folder, self._clock, environment), teams()

    def _pass(self, seconds: float, waited_share: float) -> None:
        self._clock.now_s += seconds
        self._waited_ns += int(seconds * waited_share * 1e9)
        self._stat.write_text(f"123 {self._waited_ns} 4\n")

    def window(self, waited_share: float) -> bool:
        """Whether threads wait briefly after a window of which one has waited this share for a
        core.
        """
        self._pass(WINDOW_S, waited_share)
        self.policy.adjust()
        return teams() > self._teams


def teams() -> int:
    return sum(thread.name == "tangram-team" for thread in threading.enumerate())


def eventually(count: int) -> bool:
    deadline_s = time.monotonic() + 10
    while teams() != count and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return teams() == count


@pytest.fixture
def two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def test_brief_while_others_want_the_cores_and_long_when_they_have_gone(
    tmp_path: Path, two_threads: None
) -> None:
    machine, before = Machine(tmp_path), teams()
    assert not machine.window(0.0)
    assert machine.window(0.5)
    assert teams() > before
    assert all(machine.window(0.0) for _ in range(int(FREE_S / WINDOW_S) - 1))
    assert machine.window(0.05), "somebody still takes a little"
    assert all(machine.window(0.0) for _ in range(int(FREE_S / WINDOW_S) - 1))
    machine.window(0.0)
    assert eventually(before)


def test_nothing_is_left_of_an_engine_that_is_gone(tmp_path: Path, two_threads: None) -> None:
    machine, before = Machine(tmp_path), teams()
    assert machine.window(0.5) and teams() > before
    del machine
    assert eventually(before)


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_the_users_own_policy_stays(name: str, tmp_path: Path, two_threads: None) -> None:
    assert not Machine(tmp_path, **{name: "whatever"}).window(0.9)


def test_a_system_that_tells_nothing_of_threads_is_left_alone(tmp_path: Path) -> None:
    clock = WaitingClock()
    policy, before = WaitPolicy(tmp_path / "absent", clock, {}), teams()
    clock.now_s = 10.0
    policy.adjust()
    assert teams() == before


@pytest.mark.serial
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
@pytest.mark.skipif(
    not list((Path(torch.__file__).parent / "lib").glob("libgomp*")), reason="no libgomp"
)
def test_threads_that_wait_briefly_leave_the_cores_to_others(tmp_path: Path) -> None:
    unset = {
        name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))
    }
    done = subprocess.run(
        [sys.executable, "-c", COST, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        env=unset,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) > 1.5


def test_threads_are_those_of_torch(folder: Path) -> None:
    threads = torch.get_num_threads()
    try:
        for count in (2, 1):
            LLM(
                str(folder),
                load_format="dummy",
                kv_retention=1.0,
                chunk_tokens=32,
                page_tokens=8,
                kv_cache_gib=0.01,
                max_num_seqs=4,
                max_num_batched_tokens=128,
                threads=count,
            )
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)


def test_no_threads_are_refused() -> None:
    with pytest.raises(ConfigError, match="threads is 0, it must be at least 1"):
        LLM(threads=0)
