"""What a streamed token costs the processor: `python -m bench.serving.stream_cost`.

A server of a tiny model with a real tokenizer and template answers streams of clients in processes
of their own. The processor's time of its API processes, and of the engine's, between the first
request and the last token, is divided by the tokens. `--baseline FOLDER` measures the checkout
there in turns with this one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig

from bench.bare_tokenizer import load_tokenizer
from tangram.lab.environment import environment

HERE = Path(__file__).parents[2]
RESULT = HERE / "bench" / "results" / "stream_cost.json"
START_S = 180.0
MODEL = "tiny"


def make_model(folder: Path) -> None:
    """A model that takes little time, with the embedded model's tokenizer and template."""
    tokenizer = load_tokenizer("smollm2")
    tokenizer.save_pretrained(folder)
    LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=2,
    ).save_pretrained(folder)


@contextmanager
def run_server(root: Path, model: Path, options: Sequence[str]) -> Iterator[tuple[str, int]]:
    """The server of the checkout at `root`: its port, and the id of its process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tangram", "serve", str(model), "--port", str(port)]
    command += ["--load-format", "dummy", "--kv-retention", "1.0", "--kv-cache-gib", "0.25"]
    command += ["--served-model-name", MODEL, "--threads", "1", *options]
    variables = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, cwd=root, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            _wait_until_ready(process, f"http://127.0.0.1:{port}/ready")
            yield str(port), process.pid
        finally:
            process.terminate()


def _wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s and process.poll() is None:
        try:
            if httpx.get(url, timeout=2).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    raise SystemExit(f"the server is not ready, its code is {process.poll()}")


def cpu_seconds(pid: int) -> dict[str, float]:
    """The processor's time so far of the engine's process, and of the API processes."""
    engine = psutil.Process(pid)
    api = [one for one in engine.children() if "api_process" in " ".join(one.cmdline())]
    return {"engine": _read_cpu_s(engine), "api": sum(map(_read_cpu_s, api))}


def _read_cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def follow_streams(port: str, streams: int, tokens: int, counted: Any) -> None:
    """So many streams at once, in this process; puts the number of events that have come."""
    counted.put(asyncio.run(_follow_all(port, streams, tokens)))


async def _follow_all(port: str, streams: int, tokens: int) -> int:
    return sum(await asyncio.gather(*(_follow(port, tokens) for _ in range(streams))))


async def _follow(port: str, tokens: int) -> int:
    body = json.dumps(
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": "Say something."}],
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", int(port))
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    writer.write((head + body).encode())
    events, rest = 0, b""
    while part := await reader.read(1 << 16):
        events += (rest + part).count(b"data: ")
        rest = part[-5:]
    writer.close()
    return events


def measure(root: Path, model: Path, streams: int, tokens: int, options: Sequence[str]) -> Any:
    """Microseconds of the processor for each token, and tokens a second."""
    with run_server(root, model, options) as (port, pid):
        _run_clients(port, min(4, streams), 8)  # what is compiled or loaded at its first use
        before, begin_s = cpu_seconds(pid), time.monotonic()
        events = _run_clients(port, streams, tokens)
        seconds, after = time.monotonic() - begin_s, cpu_seconds(pid)
    count = streams * tokens
    if events < count:
        raise SystemExit(f"{events} events came of {count} tokens")
    used = {name: 1e6 * (after[name] - before[name]) / count for name in after}
    return {"us": used, "tokens_per_s": count / seconds}


def _run_clients(port: str, streams: int, tokens: int) -> int:
    context = multiprocessing.get_context("spawn")
    counted: Any = context.Queue()
    shares = [len(range(at, streams, 2)) for at in range(2) if at < streams]
    clients = [
        context.Process(target=follow_streams, args=(port, share, tokens, counted))
        for share in shares
    ]
    for client in clients:
        client.start()
    events = sum(counted.get() for _ in clients)
    for client in clients:
        client.join()
    return events


def main() -> None:
    """Measure, keep the figures, print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--tokens", type=int, default=256, help="of each stream")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--baseline", type=Path, help="a checkout of another commit")
    parser.add_argument("-o", "--output", type=Path, default=RESULT)
    options = parser.parse_args()
    roots = {"here": HERE} | ({"baseline": options.baseline} if options.baseline else {})
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        for streams in options.streams:
            seats = ["--max-num-seqs", str(streams)]
            found: dict[str, list[Any]] = {name: [] for name in roots}
            for _ in range(options.repeats):
                for name, root in roots.items():
                    found[name].append(
                        measure(root.resolve(), Path(folder), streams, options.tokens, seats)
                    )
            rows += [{"streams": streams, "of": name, "runs": runs} for name, runs in found.items()]
    content = {
        "command": shlex.join(["python", "-m", "bench.serving.stream_cost", *sys.argv[1:]]),
        "environment": environment(),
        "tokens": options.tokens,
        "rows": rows,
    }
    options.output.write_text(json.dumps(content, indent=1) + "\n")
    table = Table(title="microseconds of the processor a token: median (range)")
    for name in ("streams", "of", "API processes", "the engine's process", "tokens/s"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            str(row["streams"]),
            str(row["of"]),
            _spread([run["us"]["api"] for run in row["runs"]]),
            _spread([run["us"]["engine"] for run in row["runs"]]),
            _spread([run["tokens_per_s"] for run in row["runs"]]),
        )
    Console().print(table)


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.0f} ({min(values):.0f}–{max(values):.0f})"


if __name__ == "__main__":
    main()
