"""What the page costs: kept positions while prefilling, an observer at every step, ten watchers.

Run it by `python -m bench.page_cost [prefill|step|watchers] [--output FILE]`. Both sides of a pair
run one after the other, and a figure is the median over pairs. Times are those of the processor
that the engine's process took, so that other programs on the machine count little. What `prefill`
adds is less than the noise between two prompts, so the time inside the recording functions is
measured, too. `watchers` asks
a server of the embedded model for eight answers at a time, without watchers and with ten.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx

PROMPT_TOKENS, STEPS, SECONDS = 1536, 200, 10.0
STREAMS, WATCHERS = 8, 10


def measure_prefill(pairs: int) -> dict[str, Any]:
    """Seconds of a prompt of three chunks, with kept positions recorded and without."""
    from tangram.calibrate.texts import make_texts
    from tangram.config import EngineConfig
    from tangram.engine.build import engine_of
    from tangram.engine.loop import Engine
    from tangram.engine.recorder import KeptRecorder
    from tangram.kernels import torch_kernels
    from tangram.model.load import load_model
    from tangram.page.collector import Collector
    from tangram.types import Request, SamplingParams

    loaded = load_model("smollm2")
    config = EngineConfig(kv_cache_gib=0.5)
    engines = {on: engine_of(config, loaded, records=on) for on in (False, True)}
    engines[True].watch(Collector(engines[True].stats().pages_total))
    text = make_texts(1, min_characters=8 * PROMPT_TOKENS)[0]
    prompt = engines[True].codec.encode(text)[:PROMPT_TOKENS]

    recording = _Timed(torch_kernels, "_note_first")
    recording.add(KeptRecorder, "note", "commit", "collect")

    def prefill(engine: Engine) -> float:
        engine.clear_cache()
        if engine._runner.recorder is not None:
            engine._runner.recorder.clear()
        engine.submit(
            Request("0", prompt, SamplingParams(temperature=0.0, max_tokens=1), lambda event: None)
        )
        begin_s = time.process_time()
        while engine.busy:
            engine.step()
        return time.process_time() - begin_s

    figures = _compare(pairs, lambda: prefill(engines[False]), lambda: prefill(engines[True]))
    with recording:
        taken_s = prefill(engines[True])
    return figures | {"inside_recording_s": recording.seconds, "of_s": taken_s}


class _Timed(ExitStack):
    """Within, the processor seconds of functions are added up."""

    def __init__(self, owner: Any, *names: str) -> None:
        super().__init__()
        self.seconds, self._functions = 0.0, list[tuple[Any, str]]()
        self.add(owner, *names)

    def add(self, owner: Any, *names: str) -> None:
        """Time functions `names` of `owner`, too."""
        self._functions += [(owner, name) for name in names]

    def __enter__(self) -> _Timed:
        for owner, name in self._functions:
            self.enter_context(patch.object(owner, name, self._wrap(getattr(owner, name))))
        return self

    def _wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            begin_s = time.process_time()
            try:
                return function(*args, **options)
            finally:
                self.seconds += time.process_time() - begin_s

        return call


def measure_step(pairs: int) -> dict[str, Any]:
    """Seconds of a step that decodes eight tokens with a tiny model, watched or not."""
    from transformers import LlamaConfig

    from tangram.config import EngineConfig
    from tangram.engine.build import engine_of
    from tangram.engine.loop import Engine
    from tangram.model.load import load_tokenizer
    from tangram.page.collector import Collector
    from tangram.page.watchers import Watcher
    from tangram.types import Request, SamplingParams
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
        sampling = SamplingParams(temperature=0.0, max_tokens=STEPS + 20, ignore_eos=True)
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

    return _compare(pairs, lambda: decode(plain), lambda: decode(watched))


def _compare(
    pairs: int, without: Callable[[], float], with_it: Callable[[], float]
) -> dict[str, Any]:
    without(), with_it()
    taken = [(without(), with_it()) for _ in range(pairs)]
    shares = [on / off - 1 for off, on in taken]
    return {
        "pairs": pairs,
        "without_s": statistics.median(off for off, _ in taken),
        "with_s": statistics.median(on for _, on in taken),
        "more": statistics.median(shares),
        "more_range": [min(shares), max(shares)],
    }


def measure_watchers(pairs: int) -> dict[str, Any]:
    """Processor seconds of the server's loop for each token, without watchers and with ten.

    `more` is their difference as a share of what the whole process takes for a token. The engine's
    thread is not compared: its noise is larger than what it does for watchers, see `step`.
    `slower` is the share of the tokens a second that is missing with watchers.
    """
    with _run_server() as (url, process), ExitStack() as asking:
        ended = threading.Event()
        asking.callback(ended.set)
        for number in range(STREAMS):
            thread = threading.Thread(target=_ask, args=(url, number, ended), daemon=True)
            thread.start()
        time.sleep(5)
        taken = []
        for _ in range(pairs):
            without = _cost(url, process.pid)
            with ExitStack() as stack:
                for _ in range(WATCHERS):
                    stack.enter_context(_watch(url))
                taken.append((without, _cost(url, process.pid)))
    shares = [(on.loop_s - off.loop_s) / off.process_s for off, on in taken]
    slower = [1 - off.wall_s / on.wall_s for off, on in taken]
    return {
        "pairs": pairs,
        "without_s": statistics.median(off.loop_s for off, _ in taken),
        "with_s": statistics.median(on.loop_s for _, on in taken),
        "process_s": statistics.median(off.process_s for off, _ in taken),
        "more": statistics.median(shares),
        "more_range": [min(shares), max(shares)],
        "tokens_per_s_without": statistics.median(1 / off.wall_s for off, _ in taken),
        "tokens_per_s_with": statistics.median(1 / on.wall_s for _, on in taken),
        "slower": statistics.median(slower),
        "slower_each": slower,
    }


@dataclass(frozen=True)
class Cost:
    """For each generated token: processor seconds of the server's loop and of all its threads, and
    seconds of the clock.
    """

    loop_s: float
    process_s: float
    wall_s: float


def _cost(url: str, pid: int) -> Cost:
    tokens, loop_s, process_s, begin_s = (
        _tokens(url),
        _thread_s(pid),
        _process_s(pid),
        time.monotonic(),
    )
    time.sleep(SECONDS)
    more, wall_s = _tokens(url) - tokens, time.monotonic() - begin_s
    loop_s, process_s = _thread_s(pid) - loop_s, _process_s(pid) - process_s
    return Cost(loop_s / more, process_s / more, wall_s / more)


def _tokens(url: str) -> float:
    lines = httpx.get(f"{url}/metrics", timeout=30).text.splitlines()
    name = "tangram_generated_tokens_total "
    return float(next(line for line in lines if line.startswith(name)).split()[1])


def _thread_s(pid: int) -> float:
    """Of the first thread, which runs the server's loop."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def _process_s(pid: int) -> float:
    files = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


def _ask(url: str, number: int, ended: threading.Event) -> None:
    """Stream one answer after the other."""
    body = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": f"Tell me story number {number}."}],
        "max_tokens": 600,
        "stream": True,
    }
    with httpx.Client(timeout=60) as client:
        while not ended.is_set():
            with (
                contextlib.suppress(httpx.TransportError),  # the server has ended
                client.stream("POST", f"{url}/v1/chat/completions", json=body) as response,
            ):
                for _ in response.iter_raw():
                    if ended.is_set():
                        return


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


@contextmanager
def _run_server() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--port", str(port), "--kv-cache-gib", "0.5"]
    command = [sys.executable, "-m", "tangram", "serve", *options]
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            while True:
                try:
                    if httpx.get(f"{url}/ready", timeout=5).status_code == 200:
                        break
                except httpx.TransportError:
                    time.sleep(0.2)
            yield url, process
        finally:
            process.kill()


MEASUREMENTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "prefill": measure_prefill,
    "step": measure_step,
    "watchers": measure_watchers,
}


def _main() -> None:
    from tangram.lab.environment import environment

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="*", help=", ".join(MEASUREMENTS))
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    figures = {}
    for name in given.what or MEASUREMENTS:
        found = figures[name] = MEASUREMENTS[name](given.pairs)
        low, high = found["more_range"]
        print(
            f"{name}: {1e3 * found['without_s']:.3f} ms, with it {1e3 * found['with_s']:.3f} ms, "
            f"{found['more']:+.2%} ({low:+.2%} to {high:+.2%})",
            flush=True,
        )
        if "slower" in found:
            low, high = min(found["slower_each"]), max(found["slower_each"])
            print(f"tokens/s: {-found['slower']:+.2%} ({-high:+.2%} to {-low:+.2%})", flush=True)
        if "inside_recording_s" in found:
            share = found["inside_recording_s"] / found["of_s"]
            print(f"inside the recording functions: {share:.2%} of prefill", flush=True)
    if given.output is not None:
        command = shlex.join(["python", "-m", "bench.page_cost", *sys.argv[1:]])
        content = {"command": command, "environment": environment(), "figures": figures}
        given.output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    _main()
