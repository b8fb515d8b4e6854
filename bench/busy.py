"""Speed beside a program that uses a whole core, and beside a second engine.

Run it by `python -m bench.busy [decode|prefill]`. Engines are separate processes with one request
at a time. "libgomp's own" is an engine whose threads wait in libgomp's default way, as before
`tangram/kernels/cpu/waiting.py`. Each measurement begins with a few seconds that do not count. A
repeat measures all cases, one after the other. Prefill beside a busy core is not measured with
libgomp's own waiting: a chunk takes minutes there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results" / "busy_laptop.json"
CONTEXT_TOKENS, ANSWER_TOKENS = 1000, 64
SETTLE_S, MEASURED_S = 1.5, 2.0
# libgomp's default; a value set by the user stays.
SPINNING = {"GOMP_SPINCOUNT": "300000"}
BURN = "while True: pass"


def serve_measurements() -> None:
    """The process of one engine.

    For each line on standard input, "decode" or "prefill", it prints a line with tokens/s.
    """
    from tangram.calibrate.texts import make_texts
    from tangram.config import EngineConfig
    from tangram.engine.loop import Engine
    from tangram.engine.setup.build import build_engine
    from tangram.types import Event, Request, SamplingParams

    def speed(engine: Engine, prompt: tuple[int, ...], what: str, seconds: float) -> float:
        tokens, taken_s, begin_s = 0, 0.0, time.perf_counter()
        while time.perf_counter() < begin_s + seconds:
            times: list[float] = []

            def note(event: Event, times: list[float] = times) -> None:
                if event.token_ids:
                    times.append(time.perf_counter())

            most = 1 if what == "prefill" else ANSWER_TOKENS
            params = SamplingParams.state_all(temperature=0.0, max_tokens=most, ignore_eos=True)
            if what == "prefill":
                engine.clear_cache()
            asked_s = time.perf_counter()
            engine.submit(Request("0", prompt, params, note))
            while engine.busy and (not times or time.perf_counter() < begin_s + seconds):
                engine.step()
            engine.abort("0")
            while engine.busy:
                engine.step()
            tokens += len(prompt) if what == "prefill" else len(times) - 1
            taken_s += times[0] - asked_s if what == "prefill" else times[-1] - times[0]
        return tokens / taken_s if taken_s else 0.0

    engine = build_engine(EngineConfig(kv_cache_gib=0.5))
    text = make_texts(1, min_characters=8 * CONTEXT_TOKENS)[0]
    prompt = engine.codec.encode(text)[:CONTEXT_TOKENS]
    for what in ("prefill", "decode"):
        speed(engine, prompt, what, 0.1)
    print("ready", flush=True)
    for line in sys.stdin:
        speed(engine, prompt, line.strip(), SETTLE_S)
        print(speed(engine, prompt, line.strip(), MEASURED_S), flush=True)


class EngineProcess:
    """An engine in a process and a session of its own, as from another terminal."""

    def __init__(self, **variables: str) -> None:
        inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.busy", "--engine"],
            stdin=subprocess.PIPE,
            text=True,
            stdout=subprocess.PIPE,
            env=inherited | variables,
            start_new_session=True,
        )
        self.answer()

    def ask(self, what: str) -> None:
        assert self._process.stdin is not None
        print(what, file=self._process.stdin, flush=True)

    def answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def measure_speeds(what: str, *engines: EngineProcess, burning: bool = False) -> list[float]:
    """Tokens/s of each of `engines`, all working at once, beside a busy core if `burning`."""
    with ExitStack() as stack:
        if burning:
            other = subprocess.Popen([sys.executable, "-S", "-c", BURN], start_new_session=True)
            stack.callback(other.wait)
            stack.callback(other.kill)
        for engine in engines:
            engine.ask(what)
        return [float(engine.answer()) for engine in engines]


def measure(what: str, repeats: int) -> dict[str, list[float]]:
    """Tokens/s of each repeat, by case; of two engines the slower."""
    with ExitStack() as stack:
        first, second, spinning = EngineProcess(), EngineProcess(), EngineProcess(**SPINNING)
        for engine in (first, second, spinning):
            stack.callback(engine.end)
        speeds: dict[str, list[float]] = {}
        cases: dict[str, Callable[[], list[float]]] = {
            "idle": lambda: measure_speeds(what, first),
            "idle, libgomp's own": lambda: measure_speeds(what, spinning),
            "one core burnt": lambda: measure_speeds(what, first, burning=True),
            "two engines, the slower": lambda: measure_speeds(what, first, second),
        }
        if what == "decode":
            cases["one core burnt, libgomp's own"] = lambda: measure_speeds(
                what, spinning, burning=True
            )
        for _ in range(repeats):
            for case, run in cases.items():
                speeds.setdefault(case, []).append(min(run()))
    return speeds


def report(speeds: dict[str, list[float]], what: str) -> None:
    """Print the table and keep the raw figures beside those of the other kind of work."""
    from tangram_lab.environment import environment

    idle = statistics.median(speeds["idle, libgomp's own"])
    table = Table(title=f"{what}, {CONTEXT_TOKENS} tokens of context, one request")
    for column in ("case", "tokens/s (median)", "range", "of idle, libgomp's own"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for case, found in speeds.items():
        median = statistics.median(found)
        table.add_row(
            case, f"{median:.2f}", f"{min(found):.2f} - {max(found):.2f}", f"{median / idle:.2f}"
        )
    Console().print(table)
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    kept[what] = {
        "command": f"python -m bench.busy {what}",
        "cores": os.cpu_count(),
        "environment": environment(),
        "tokens_per_s": speeds,
    }
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=("decode", "prefill"), default="decode")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        serve_measurements()
    else:
        report(measure(options.what, options.repeats), options.what)


if __name__ == "__main__":
    main()
