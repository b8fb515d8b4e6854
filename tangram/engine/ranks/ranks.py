"""The processes of one model on several devices. This one is rank 0; it starts and ends the others.

Each rank has a process, because Python computes on one core at a time and a GPU takes launches from
one thread. Rank 0 tells the others what to compute through pipes. They meet in the collectives of
torch.distributed inside the model. A rank that has failed says why through its pipe.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from threading import Thread

import torch
from torch import distributed as dist

from tangram.config import EngineConfig
from tangram.errors import ConfigError, EngineError
from tangram.kernels.cpu.threads import use_threads
from tangram.model.device import find_device
from tangram.model.load import memory_ran_out

_REPORT_S = 10.0  # how long rank 0 waits for the reason of another rank's failure
_LEAVE_S = 10.0  # how long it waits for NCCL, which has little left to do
WORKER = "tangram.engine.rank_process"

_log = logging.getLogger("tangram")


@dataclass(frozen=True)
class RankStart:
    """What a rank's process needs: the config, its `rank`, and the file where the ranks meet."""

    config: EngineConfig
    rank: int
    meeting: str


class Ranks:
    """The other ranks of an engine of `config`. Once made, all ranks are in one process group.

    Raises `ConfigError` if there are too few devices, and `EngineError` if a rank does not start.
    """

    def __init__(self, config: EngineConfig) -> None:
        size, device = config.tensor_parallel_size, find_device(config.device)
        if dist.is_initialized():
            raise ConfigError(
                f"tensor_parallel_size is {size}, but this process has an engine on several "
                "devices already: end that one first (`engine.stop()`), or start another process"
            )
        if device.type == "cpu" and torch.cuda.is_available():
            raise ConfigError(
                f"tensor_parallel_size is {size} on the CPU of a machine with GPUs, which "
                "Transformers would take: hide them with CUDA_VISIBLE_DEVICES="
            )
        places = visible_devices(size) if device.type == "cuda" else [""] * size
        self.fault: str | None = None
        self._on_fault: Callable[[str], object] = lambda fault: None
        self._release: Callable[[], object] = lambda: None
        self._closing, self._faulted = False, threading.Event()
        self._joined = Future[None]()
        self._folder = tempfile.TemporaryDirectory(prefix="tangram-ranks-")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Connection] = []
        self._monitor = Thread(target=self._watch, name="tangram-ranks", daemon=True)
        self._abort_thread = Thread(target=_abort_collectives, name="tangram-abort", daemon=True)
        self._aborting = threading.Lock()
        try:
            for place in places[1:]:
                self._start(place)
            self._meet(config)
        except BaseException:
            self.close()
            raise

    def _start(self, place: str) -> None:
        ours, theirs = Pipe()
        hidden = {"CUDA_VISIBLE_DEVICES": place} if place else {}
        quiet = {"TTY_COMPATIBLE": "0"}  # one progress bar is enough
        with theirs:
            command = [sys.executable, "-m", WORKER, str(theirs.fileno())]
            self._processes.append(
                subprocess.Popen(
                    command,
                    pass_fds=[theirs.fileno()],
                    env=os.environ | hidden | quiet,
                    start_new_session=True,  # an interrupt is for rank 0, which ends the others
                )
            )
        self._pipes.append(ours)

    def _meet(self, config: EngineConfig) -> None:
        meeting = str(Path(self._folder.name) / "meeting")
        for number, pipe in enumerate(self._pipes, 1):
            try:
                pipe.recv()  # it is ready: from here on a rank that ends breaks collectives
                pipe.send(RankStart(config, number, meeting))
            except (EOFError, OSError) as error:
                raise EngineError(f"{self._name(number)} did not start: {_spell(error)}") from error
        self._monitor.start()
        share_cores(config)
        # In a thread, because it waits for ranks that may have ended meanwhile.
        Thread(target=self._join, args=(config, meeting), daemon=True).start()
        self._joined.result()

    def _join(self, config: EngineConfig, meeting: str) -> None:
        try:
            join_ranks(config, 0, meeting)
        except Exception as error:
            self._settle(error)
        else:
            self._settle(None)

    def _settle(self, error: Exception | None) -> None:
        """The ranks have met, or will not; what comes first counts."""
        with suppress(InvalidStateError):
            if error is None:
                self._joined.set_result(None)
            else:
                self._joined.set_exception(error)

    @contextmanager
    def computing(self, told: bytes) -> Iterator[None]:
        """Tell the other ranks `told`, and compute with them.

        Raises `EngineError` that names the rank which has failed. If rank 0 fails, all end: the
        others may wait for it in the middle of the model.
        """
        if self.fault is not None:
            raise EngineError(self.fault)
        try:
            for pipe in self._pipes:
                pipe.send_bytes(told)
            yield
        except BaseException as error:
            if (found := self.explain(error)) is error:
                raise
            raise found from error

    def explain(self, error: BaseException) -> BaseException:
        """End all ranks after `error` of rank 0; the error to raise instead."""
        fault = None
        if isinstance(error, OSError | RuntimeError) and not memory_ran_out(error):
            self._faulted.wait(_REPORT_S)  # perhaps it is the consequence of another rank's
            fault = self.fault
        self.fault = fault or f"rank 0 has failed: {_spell(error)}"
        self.close()
        return error if fault is None else EngineError(fault)

    def tell_faults(self, on_fault: Callable[[str], object]) -> None:
        """Call `on_fault`, in another thread, when a rank fails."""
        self._on_fault = on_fault
        if self.fault is not None:
            on_fault(self.fault)

    def release_by(self, release: Callable[[], object]) -> None:
        """Call `release` when the ranks end: it drops the graphs that hold collectives."""
        self._release = release

    def close(self) -> None:
        """End the other ranks. Nothing can be computed any more."""
        self._closing = True
        self.fault = self.fault or "the ranks of this engine have ended"
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        if self._monitor.is_alive() and self._monitor is not threading.current_thread():
            self._monitor.join()
        for pipe in self._pipes:
            pipe.close()
        self._release()
        if _uses_nccl():
            self._abort()
            self._abort_thread.join(_LEAVE_S)
            if self._abort_thread.is_alive():
                _log.warning(
                    "NCCL has not ended its work in %d s: this process can have no other engine on "
                    "several devices",
                    _LEAVE_S,
                )
        elif dist.is_initialized():
            dist.destroy_process_group()
        self._folder.cleanup()

    def _abort(self) -> None:
        """End the collectives of this rank, which wait for others. Call it as often as you like.

        NCCL does this at once, and then waits until no graph holds one (`release_by`).
        """
        with self._aborting:
            if self._abort_thread.ident is None:
                self._abort_thread.start()

    def _watch(self) -> None:
        """Wait for the first rank that reports a failure or ends."""
        ready = wait(self._pipes)
        if self._closing:
            return
        number, pipe = next(entry for entry in enumerate(self._pipes, 1) if entry[1] in ready)
        try:
            report = f"has failed: {pipe.recv()}"
        except (EOFError, OSError):
            code = self._processes[number - 1].wait()
            report = f"was ended by signal {-code}" if code < 0 else f"has ended with code {code}"
        self.fault = f"{self._name(number)} {report}: start the engine again"
        self._faulted.set()
        self._settle(EngineError(self.fault))
        if _uses_nccl():
            self._abort()
        self._on_fault(self.fault)

    def _name(self, number: int) -> str:
        return (
            f"rank {number} of {len(self._pipes) + 1} (process {self._processes[number - 1].pid})"
        )


def join_ranks(config: EngineConfig, rank: int, meeting: str) -> None:
    """Join the process group of all ranks, who meet at the file `meeting`."""
    size, device = config.tensor_parallel_size, find_device(config.device)
    if device.type == "cuda":
        # A capture would have NCCL agree with ranks that capture nothing just then.
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store = dist.FileStore(meeting, size)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)


def _uses_nccl() -> bool:
    return dist.is_initialized() and dist.get_backend() != "gloo"


def _abort_collectives() -> None:
    if dist.is_initialized():
        dist.distributed_c10d._abort_process_group()


def share_cores(config: EngineConfig) -> None:
    """Take this rank's share of the cores, if ranks compute on the CPU and no option says more."""
    if find_device(config.device).type == "cpu" and config.threads is None:
        use_threads(max(1, torch.get_num_threads() // config.tensor_parallel_size))


def agree_on_least(value: int, device: torch.device) -> int:
    """The least `value` of all ranks."""
    least = torch.tensor([value], device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return int(least.item())


def visible_devices(size: int) -> list[str]:
    """The first `size` GPUs that this process sees. Raises `ConfigError` if there are fewer."""
    count = torch.cuda.device_count()
    if count < size:
        raise ConfigError(
            f"tensor_parallel_size is {size}, but PyTorch sees {count} GPUs here: lower it, or "
            "show more with CUDA_VISIBLE_DEVICES"
        )
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(place) for place in (given.split(",") if given else range(count))][:size]


def _spell(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
