"""What the page costs: kept positions while prefilling, an observer at every step, ten watchers.

Run it by `OMP_NUM_THREADS=1 python -m bench.page_cost [prefill|step|watchers] [--output FILE]`.
Each figure comes from many short pairs, with and without, in one process. The one that runs first
changes from pair to pair, so that a drift of the machine counts for both. A figure is the median
over pairs, with a 95 % interval of that median from order statistics: it supposes nothing of how
the noise is distributed.

`prefill` and `step` compare the processor's time of the engine's process, so that other programs
count little. `watchers` serves eight streams of the embedded model with one thread, and has its
clients in other processes. It compares the clock and the processor's time of whole decode steps.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import shlex
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from itertools import pairwise
from math import comb
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx

PROMPT_TOKENS, STEPS, STREAM_TOKENS = 520, 200, 400
WINDOW_S, SETTLE_S = 3.0, 0.5
STREAMS, WATCHERS = 8, 10
CONFIDENCE = 0.95

Figures = dict[str, Any]


def compare(pairs: int, without: Callable[[], float], with_it: Callable[[], float]) -> Figures:
    """Both figures, and the share by which `with_it` is larger."""
    without(), with_it()
    taken = []
    for number in range(pairs):
        if number % 2:
            on, off = with_it(), without()
        else:
            off, on = without(), with_it()
        taken.append((off, on))
    return describe([off for off, _ in taken], [on for _, on in taken])


def describe(without: Sequence[float], with_it: Sequence[float]) -> Figures:
    """The medians, and the share that `with_it` is larger in each pair."""
    shares = [on / off - 1 for off, on in zip(without, with_it, strict=True)]
    return {
        "pairs": len(shares),
        "without_s": statistics.median(without),
        "with_s": statistics.median(with_it),
        "more": statistics.median(shares),
        "more_interval": find_interval(shares),
        "more_each": [round(share, 5) for share in shares],
    }


def find_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the median: so many values lie below it by chance (binomial, 1/2)."""
    count, ordered = len(values), sorted(values)
    bound = (1 - CONFIDENCE) / 2 * 2**count
    outside = 0
    while outside < count // 2 and sum(comb(count, at) for at in range(outside + 1)) <= bound:
        outside += 1
    below = max(0, outside - 1)
    return ordered[below], ordered[-1 - below]


def measure_prefill(pairs: int) -> Figures:
    """Seconds of a prompt of one chunk, with kept positions recorded and without.

    One engine does both: without, the functions that record do nothing. Then the seconds inside
    these functions are added up.
    """
    from tangram.calibrate.texts import make_texts
    from tangram.config import EngineConfig
    from tangram.engine.passes.recorder import KeptRecorder
    from tangram.engine.setup.build import engine_of
    from tangram.kernels import reference_kernels
    from tangram.model.load import load_model
    from tangram.types import Request, SamplingParams
    from tangram.web.collector import Collector

    engine = engine_of(EngineConfig(kv_cache_gib=0.5), load_model("smollm2"), records=True)
    engine.watch(Collector(engine.stats().pages_total))
    text = make_texts(1, min_characters=8 * PROMPT_TOKENS)[0]
    prompt = engine.codec.encode(text)[:PROMPT_TOKENS]
    names = ("note", "commit", "collect")
    recording = [(reference_kernels, "_note_first"), *((KeptRecorder, name) for name in names)]

    def prefill() -> float:
        engine.clear_cache()
        recorder = engine._runner.recorder
        assert recorder is not None
        recorder.clear()
        engine.submit(
            Request(
                "0",
                prompt,
                SamplingParams.state_all(temperature=0.0, max_tokens=1),
                lambda event: None,
            )
        )
        begin_s = time.process_time()
        while engine.busy:
            engine.step()
        return time.process_time() - begin_s

    def prefill_without() -> float:
        with _replace(recording, lambda function: lambda *args, **options: None):
            return prefill()

    figures = compare(pairs, prefill_without, prefill)
    inside = []
    for _ in range(max(1, pairs // 4)):
        clock = _Clock()
        with _replace(recording, clock.time_call):
            taken_s = prefill()
        inside.append(clock.seconds / taken_s)
    return figures | {"inside": statistics.median(inside), "inside_interval": find_interval(inside)}


@contextmanager
def _replace(
    functions: Sequence[tuple[Any, str]], change: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    with ExitStack() as stack:
        for owner, name in functions:
            stack.enter_context(patch.object(owner, name, change(getattr(owner, name))))
        yield


@dataclass
class _Clock:
    """Adds up processor seconds of functions that do not call each other, by `now`."""

    now: Callable[[], float] = time.process_time
    seconds: float = 0.0

    def time_call(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            begin_s = self.now()
            try:
                return function(*args, **options)
            finally:
                self.seconds += self.now() - begin_s

        return call


def measure_step(pairs: int) -> Figures:
    """Seconds of a step that decodes eight tokens with a tiny model, watched or not."""
    from transformers import LlamaConfig

    from bench.bare_tokenizer import load_tokenizer
    from tangram.config import EngineConfig
    from tangram.engine.loop import Engine
    from tangram.engine.setup.build import engine_of
    from tangram.types import Request, SamplingParams
    from tangram.web.collector import Collector
    from tangram.web.watchers import Watcher
    from tests.small_engines import tiny_model

    shape = LlamaConfig(vocab_size=300, hidden_size=32, intermediate_size=32, num_hidden_layers=2)
    shape.num_attention_heads = shape.num_key_value_heads = 4
    shape.head_dim, shape.pad_token_id = 16, 0
    loaded = tiny_model(shape, load_tokenizer("smollm2"))
    config = EngineConfig(kv_retention=1.0, kv_cache_gib=0.05, chunk_tokens=512)
    plain, watched = (engine_of(replace(config), loaded) for _ in range(2))
    collector = Collector(watched.stats().pages_total)
    collector.watchers.add(Watcher(None))
    watched.watch(collector)

    def decode(engine: Engine) -> float:
        sampling = SamplingParams.state_all(temperature=0.0, max_tokens=STEPS + 20, ignore_eos=True)
        for number in range(STREAMS):
            prompt = tuple(range(3 + number, 60 + number))
            engine.submit(Request(str(number), prompt, sampling, lambda event: None))
        for _ in range(10):
            engine.step()
        begin_s = time.process_time()
        for _ in range(STEPS):
            engine.step()
        taken_s = (time.process_time() - begin_s) / STEPS
        while engine.busy:
            engine.step()
        return taken_s

    return compare(pairs, lambda: decode(plain), lambda: decode(watched))


def measure_watchers(pairs: int) -> Figures:
    """Seconds of a decode step of eight streams, with ten watchers and without.

    The figures themselves are those of the clock: what a stream waits longer for its tokens.
    `processor` is the time of the whole process. `beside` is what the other threads take more, and
    `telling` what the page's observer takes more on the engine's thread, as shares of that time.
    Both together are `caused`: the rest of `processor` is noise of the model's own work.
    """
    from tangram.web.collector import Collector

    telling = _Clock(time.thread_time)
    probe = _StepProbe(telling)
    with (
        _replace([(Collector, "observe")], telling.time_call),
        _serving(probe) as url,
        _clients(url) as watch,
    ):
        time.sleep(5)
        costs: dict[bool, list[_Cost]] = {False: [], True: []}
        for number in range(pairs):
            for on in (bool(number % 2), not number % 2):
                watch(on)
                time.sleep(SETTLE_S)
                begin = len(probe.moments)
                time.sleep(WINDOW_S)
                costs[on].append(_mean_cost(probe.moments[begin:]))
    without, with_it = costs[False], costs[True]
    parts = {
        name: describe(*([getattr(cost, name) for cost in side] for side in (without, with_it)))
        for name in ("wall_s", "process_s")
    }
    pairs_of = list(zip(without, with_it, strict=True))
    beside = [(on.beside_s - off.beside_s) / off.process_s for off, on in pairs_of]
    telling_s = [(on.telling_s - off.telling_s) / off.process_s for off, on in pairs_of]
    caused = [sum(both) for both in zip(beside, telling_s, strict=True)]
    found = parts["wall_s"] | {"processor": parts["process_s"]}
    for name, shares in (("beside", beside), ("telling", telling_s), ("caused", caused)):
        found |= {name: statistics.median(shares), f"{name}_interval": find_interval(shares)}
    return found


@dataclass(frozen=True)
class _Moment:
    """The end of a step: whether it decoded all streams and nothing else, and all clocks."""

    decoded: bool
    wall_s: float
    process_s: float
    engine_s: float
    telling_s: float


@dataclass
class _StepProbe:
    """An observer that notes when each step has ended, on the engine's thread."""

    telling: _Clock
    moments: list[_Moment] = field(default_factory=list)

    def observe(self, news: Any, readings: Any) -> None:
        """See `tangram.watch.Observer`."""
        step = news.step
        if step is None:
            return
        decoded = step.decode_rows == STREAMS and not (step.chunks or step.tail_tokens)
        clocks = time.monotonic(), time.process_time(), time.thread_time(), self.telling.seconds
        self.moments.append(_Moment(decoded, *clocks))


@dataclass(frozen=True)
class _Cost:
    """Seconds of a decode step: of the clock, of the process, of its other threads, and of telling
    the page of it.
    """

    wall_s: float
    process_s: float
    beside_s: float
    telling_s: float


def _mean_cost(moments: Sequence[_Moment]) -> _Cost:
    both = [pair for pair in pairwise(moments) if all(one.decoded for one in pair)]
    wall_s, process_s, engine_s, telling_s = (
        statistics.fmean(getattr(after, name) - getattr(before, name) for before, after in both)
        for name in ("wall_s", "process_s", "engine_s", "telling_s")
    )
    return _Cost(wall_s, process_s, process_s - engine_s, telling_s)


@contextmanager
def _serving(probe: _StepProbe) -> Iterator[str]:
    """The embedded model with its page, in this process."""
    from tangram.config import EngineConfig
    from tangram.engine.setup.build import build_engine
    from tangram.link.linked_engine import LinkedEngine
    from tangram.serve.http import build_app, transport_options
    from tangram.serve.options import Visibility
    from tangram.web.access import Access
    from tangram.web.api import CacheWeb
    from tangram.web.desk import WebDesk
    from tests.running import run_app

    engine = build_engine(EngineConfig("smollm2", kv_cache_gib=0.5, threads=1), records=True)
    engine.watch(probe)
    linked = LinkedEngine(engine, WebDesk(engine, "smollm2"))
    web = CacheWeb(linked, Access(Visibility.local, "127.0.0.1"))
    app = build_app(linked, served_model_name="smollm2", web=web)
    with run_app(app, **transport_options()) as running:
        yield running.url


@contextmanager
def _clients(url: str) -> Iterator[Callable[[bool], None]]:
    """Streams that never end, in a process of their own; what begins and ends the watchers."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    asking = context.Process(target=_ask_forever, args=(url,), daemon=True)
    watching = context.Process(target=_follow_orders, args=(url, theirs), daemon=True)
    asking.start()
    watching.start()

    def watch(wanted: bool) -> None:
        ours.send(wanted)
        ours.recv()

    try:
        yield watch
    finally:
        for process in (asking, watching):
            process.kill()
            process.join()


def _ask_forever(url: str) -> None:
    os.nice(5)  # a client of another machine takes nothing of this one's processors
    threads = [threading.Thread(target=_ask, args=(url, at)) for at in range(STREAMS)]
    for thread in threads:
        thread.start()


def _ask(url: str, number: int) -> None:
    """Stream one answer after the other."""
    body = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": f"Tell me story number {number}."}],
        "max_tokens": STREAM_TOKENS,
        "ignore_eos": True,
        "stream": True,
    }
    with httpx.Client(timeout=60) as client:
        while True:
            with client.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
                response.raise_for_status()
                for _ in response.iter_raw():
                    pass


def _follow_orders(url: str, orders: Connection) -> None:
    """Watch, or watch no more, as `orders` say."""
    os.nice(5)
    with ExitStack() as open_ones:
        while True:
            if orders.recv():
                for _ in range(WATCHERS):
                    open_ones.enter_context(_watch(url))
            else:
                open_ones.close()
            orders.send(True)


@contextmanager
def _watch(url: str) -> Iterator[None]:
    """A watcher that reads everything and does nothing with it."""
    host, port = url.removeprefix("http://").split(":")
    with closing(socket.create_connection((host, int(port)))) as connection:
        connection.sendall(f"GET /v1/kv/events HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())

        def read() -> None:
            with contextlib.suppress(OSError):  # the connection is closed
                while connection.recv(1 << 20):
                    pass

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        yield
        connection.shutdown(socket.SHUT_RDWR)
        reader.join()


# What is measured, and in how many pairs: under nine minutes together on two cores.
MEASUREMENTS: dict[str, tuple[Callable[[int], Figures], int]] = {
    "prefill": (measure_prefill, 80),
    "step": (measure_step, 60),
    "watchers": (measure_watchers, 36),
}


def _spell(share: float, interval: tuple[float, float]) -> str:
    low, high = interval
    return f"{share:+.2%} ({low:+.2%} to {high:+.2%})"


def _report(name: str, found: Figures) -> None:
    times = f"{1e3 * found['without_s']:.3f} ms, with it {1e3 * found['with_s']:.3f} ms"
    print(f"{name}: {times}, {_spell(found['more'], found['more_interval'])}", flush=True)
    if "inside" in found:
        share = _spell(found["inside"], found["inside_interval"])
        print(f"  inside the recording functions: {share} of prefill", flush=True)
    if "processor" in found:
        whole = found["processor"]
        print(f"  the processor's time: {_spell(whole['more'], whole['more_interval'])}, of it")
        for part, where in (
            ("beside", "beside the engine"),
            ("telling", "telling the page"),
            ("caused", "both"),
        ):
            print(f"  {where}: {_spell(found[part], found[f'{part}_interval'])}", flush=True)


def _main() -> None:
    from tangram_lab.environment import environment

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="*", help=", ".join(MEASUREMENTS))
    parser.add_argument("--pairs", type=int, help="of each measurement, instead of its own number")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    figures = {}
    for name in given.what or MEASUREMENTS:
        measure, pairs = MEASUREMENTS[name]
        found = figures[name] = measure(given.pairs or pairs)
        _report(name, found)
    if given.output is not None:
        threads = f"OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', '')}"
        command = f"{threads} {shlex.join(['python', '-m', 'bench.page_cost', *sys.argv[1:]])}"
        content = {"command": command, "environment": environment(), "figures": figures}
        given.output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    _main()
