"""A system of the comparison in a process of its own, seen from here."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tangram_lab.load.asks import Ask
from tangram_lab.load.clock import TimedAnswer

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build"


@dataclass(frozen=True)
class PeerSystem:
    """A system in an environment. `exact` says that it computes the model without loss."""

    title: str
    module: str
    python: Path
    options: Mapping[str, Any]
    exact: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)


class MissingPeerError(Exception):
    """A system that cannot be measured here; the text says why, and what to do."""


class SystemProcess:
    """A running system; raises `MissingPeerError` where it cannot run."""

    def __init__(self, name: str, system: PeerSystem, threads: int) -> None:
        if not system.python.exists():
            raise MissingPeerError(
                f"{system.title} is not installed, {system.python} is missing: run `make peers`"
            )
        BUILD.mkdir(exist_ok=True)
        # Its environment has neither Tangram nor the lab.
        path = [str(ROOT), str(ROOT / "lab"), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._title, self._log = system.title, BUILD / f"cpu_peers-{name}.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [
                    str(system.python),
                    "-m",
                    f"bench.cpu_peers.{system.module}",
                    json.dumps(dict(system.options)),
                ],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ
                | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": os.pathsep.join(path)}
                | dict(system.variables),
            )
        self.versions: dict[str, str] = self._receive()

    def encode(self, text: str) -> list[int]:
        """See `Peer`."""
        self._send({"text": text})
        return list(self._receive())

    def answer(self, asks: Sequence[Ask], forget: bool) -> list[TimedAnswer]:
        """See `Peer`; with `forget` no cached prefix is used."""
        self._send({"asks": [asdict(ask) for ask in asks], "forget": forget})
        return [TimedAnswer(**answer) for answer in self._receive()]

    def end(self) -> None:
        """End the process; its caches go with it."""
        self._process.kill()
        self._process.communicate()

    def _send(self, content: Any) -> None:
        assert self._process.stdin is not None
        print(json.dumps(content), file=self._process.stdin, flush=True)

    def _receive(self) -> Any:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return json.loads(line)
        self.end()
        said = self._log.read_text(errors="replace").strip().splitlines() or ["nothing"]
        raise MissingPeerError(f"{self._title} ended, {self._log} ends with: {said[-1]}")


def start_systems(
    systems: Mapping[str, PeerSystem], threads: int, stack: ExitStack
) -> tuple[dict[str, SystemProcess], dict[str, str]]:
    """The systems that run, and why the others do not. Each of these is named at once."""
    running: dict[str, SystemProcess] = {}
    skipped: dict[str, str] = {}
    for name, system in systems.items():
        try:
            running[name] = SystemProcess(name, system, threads)
            stack.callback(running[name].end)
        except MissingPeerError as error:
            skipped[name] = str(error)
            print(f"left out: {error}", flush=True)
    if not running:
        raise SystemExit("no system can be measured")
    return running, skipped
