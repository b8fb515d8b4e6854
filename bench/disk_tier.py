"""What a disk behind host memory gives and costs: `python -m bench.disk_tier FOLDER -o FILE.json`.

`turns` compares the second turn of a long conversation, whose chunks are in the pool, with the same
turn after a restart: then they are on disk, and not in the kernel's memory. `store` reads and
writes chunks as files and as rows of SQLite, and reads as `fio` does, which it needs. `decode` is
the time of steps that decode, alone and while chunks are read and written beside them. `start` is
the time that a start takes more with a store of 100 GB, of sparse files. The model is the embedded
one, at ρ 1.0, told that it may read more tokens than it was made for.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import sqlite3
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from tangram.cache.disk_store import DiskStore, open_store
from tangram.config import EngineConfig
from tangram.engine.loop import Engine
from tangram.engine.setup.build import build_engine
from tangram.model.load import resolve_source
from tangram.types import Event, Int32, LinkName, Request, SamplingParams
from tangram_lab.environment import environment

CHUNK = 512
ANSWER = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
MIB = 1 << 20


def longer_model(folder: Path, tokens: int) -> Path:
    """The embedded model with so many positions, in `folder`."""
    target = folder / "model"
    shutil.copytree(resolve_source("smollm2"), target, dirs_exist_ok=True)
    config = target / "config.json"
    known = json.loads(config.read_text())
    config.write_text(json.dumps(known | {"max_position_embeddings": tokens}))
    return target


def start(folder: Path, tokens: int, form: str = "auto") -> Engine:
    """An engine whose disk is in `folder`, for sequences of `tokens`, which are kept in `form`."""
    model = longer_model(folder, tokens)
    return build_engine(
        EngineConfig(
            str(model),
            kv_retention=1.0,
            kv_cache_gib=1.5,
            kv_offload_gib=0.5,
            kv_offload_dtype=form,
            kv_disk_path=str(folder / "store"),
            kv_disk_gib=4.0,
        )
    )


def ask(engine: Engine, prompt: Sequence[int]) -> dict[str, Any]:
    """A request alone: its seconds, those to the first token, its cached tokens and its answer."""
    events, came = list[Event](), list[float]()

    def take(event: Event) -> None:
        events.append(event)
        came.append(time.perf_counter())

    begin_s = time.perf_counter()
    engine.submit(Request("one", tuple(prompt), ANSWER, take))
    while engine.busy:
        engine.step()
    return {
        "s": came[-1] - begin_s,
        "first_s": came[0] - begin_s,
        "cached": events[-1].usage.cached_tokens,
        "answer": [token for event in events for token in event.token_ids],
    }


def make_cold(folder: Path) -> None:
    """Let the kernel forget the files in `folder`."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure_turns(folder: Path, history: int, repeats: int, form: str) -> dict[str, Any]:
    """Second turns of 64 tokens behind `history`, without and with a restart before each."""
    tokens = np.random.default_rng(history).integers(5, 4000, history + 1).tolist()
    engine = start(folder, history + 4 * CHUNK, form)
    first = ask(engine, tokens)
    found: dict[str, list[dict[str, Any]]] = {"without": [], "with": []}
    for number in range(repeats):
        # The last tokens of the turn before are another's: nothing of it is reused.
        turn = [*tokens, *(np.arange(64) * (number + 3) % 3000 + 5).tolist()]
        found["without"].append(ask(engine, turn))
        engine.stop()
        make_cold(folder / "store")
        restarted = start(folder, history + 4 * CHUNK, form)
        ask(restarted, tokens[: CHUNK // 2])  # whatever the first step of a process makes
        found["with"].append(ask(restarted, turn))
        if found["with"][-1]["answer"] != found["without"][-1]["answer"]:
            raise SystemExit("the answers differ")
        restarted.stop()
        engine = start(folder, history + 4 * CHUNK, form)
        ask(engine, tokens)
    engine.stop()
    for each in found["with"] + found["without"]:
        del each["answer"]
    ratios = {
        kind: median(entry[kind] for entry in found["with"])
        / median(entry[kind] for entry in found["without"])
        for kind in ("s", "first_s")
    }
    return {
        "history": history,
        "form": form,
        "prefill_s": first["first_s"],
        "ratios": ratios,
        **found,
    }


def name_of(number: int) -> LinkName:
    """The name of a chunk that nothing computed."""
    return LinkName(bytes(32), number.to_bytes(32))


def measure_store(folder: Path, pages: Int32, count: int) -> dict[str, Any]:
    """MiB/s of `count` chunks of `pages`: written, and read cold, of files and of SQLite."""
    store = open_store(folder / "files", {"made": "by bench"}, 1 << 40)
    base = sqlite3.connect(folder / "rows.sqlite")
    base.execute("pragma journal_mode=wal")
    base.execute("create table if not exists links (key blob primary key, words blob)")
    names = [name_of(number) for number in range(count)]

    def write_rows() -> None:
        for name in names:
            with base:
                base.execute("insert or replace into links values (?, ?)", (name.key, pages.data))

    def read_rows() -> None:
        for name in names:
            query = "select words from links where key = ?"
            np.frombuffer(base.execute(query, (name.key,)).fetchone()[0], np.int32).copy()

    def write_files() -> None:
        for name in names:
            store.write(name, pages, store.epoch)

    done = {
        "files_written": rate_of(write_files, count * pages.nbytes),
        "rows_written": rate_of(write_rows, count * pages.nbytes),
    }
    base.execute("pragma wal_checkpoint(truncate)")
    make_cold(folder)
    done["files_read"] = rate_of(lambda: read_files(store, names, pages), count * pages.nbytes)
    make_cold(folder)
    done["rows_read"] = rate_of(read_rows, count * pages.nbytes)
    done["fio_read"] = run_fio(folder, pages.nbytes, count)
    base.close()
    return {"chunk_bytes": pages.nbytes, "chunks": count, "mib_s": done}


def read_files(store: DiskStore, names: Sequence[LinkName], pages: Int32) -> None:
    """Read as the disk tier does, and compare."""
    store.advise(names)
    for name in names:
        if store.read(name, pages.shape) is None:
            raise SystemExit("a chunk is lost")


def rate_of(work: Callable[[], object], size_bytes: int) -> float:
    """MiB/s."""
    begin_s = time.perf_counter()
    work()
    return size_bytes / MIB / (time.perf_counter() - begin_s)


def run_fio(folder: Path, block_bytes: int, count: int) -> float:
    """MiB/s of sequential reads of as many files of a block each, by the page cache, cold."""
    laid_out = folder / "fio"
    laid_out.mkdir()
    command = ["fio", "--name=read", "--rw=read", f"--bs={block_bytes}", "--ioengine=psync"]
    command += [f"--filesize={block_bytes}", f"--nrfiles={count}", f"--directory={laid_out}"]
    command += ["--file_service_type=sequential", "--invalidate=1", "--output-format=json"]
    subprocess.run([*command, "--create_only=1"], check=True, capture_output=True)
    make_cold(laid_out)
    told = subprocess.run(command, check=True, capture_output=True)
    return float(json.loads(told.stdout)["jobs"][0]["read"]["bw_bytes"]) / MIB


def measure_decode(folder: Path, repeats: int) -> dict[str, Any]:
    """Seconds of steps of 4 rows that decode: alone, while 4K tokens are read, while written."""
    history = 4096
    tokens = np.random.default_rng(history).integers(5, 4000, history + 1).tolist()
    engine = start(folder, history + 4 * CHUNK)
    ask(engine, tokens)
    scheduler = engine._scheduler
    disk = scheduler.cache.disk
    if disk is None:
        raise SystemExit("the engine has no disk")
    pages = np.zeros((engine.layout.span_pages, disk.page_bytes // 4), np.int32)
    for number in range(4):
        params = SamplingParams(temperature=0.0, max_tokens=1500, ignore_eos=True)
        prompt = tuple(tokens[number : number + 40])
        engine.submit(Request(f"row {number}", prompt, params, lambda _: None))
    for _ in range(30):
        engine.step()
    steps: dict[str, list[float]] = {"alone": [], "reading": [], "writing": [], "alone again": []}
    for number in range(repeats):
        for kind, into in steps.items():
            ended = time.perf_counter() + 1.0
            if kind == "reading":
                scheduler.cache.prefix.clear()
                make_cold(folder / "store")
                engine.submit(Request("read", tuple(tokens), ANSWER, lambda _: None))
                engine.step()
            written = 0
            while time.perf_counter() < ended and (kind != "reading" or scheduler.fetching):
                if kind == "writing" and time.perf_counter() - ended + 1 > written / 4:
                    disk.save(name_of(1000 * number + written), pages.nbytes, lambda: pages)
                    written += 1
                begin_s = time.perf_counter()
                engine.step()
                into.append(time.perf_counter() - begin_s)
            engine.abort("read")
            engine.step()
    engine.stop()
    return {
        "history": history,
        "written_mib_s": 4 * pages.nbytes / MIB,
        "median_ms": {kind: 1e3 * median(times) for kind, times in steps.items()},
        "mean_ms": {kind: 1e3 * sum(times) / len(times) for kind, times in steps.items()},
        "steps": {kind: len(times) for kind, times in steps.items()},
    }


def measure_start(folder: Path, link_bytes: int) -> dict[str, float]:
    """Seconds to open a store of 100 GB, and to look through it, which nothing waits for."""
    store = open_store(folder / "sparse", {"made": "by bench"}, 1 << 40)
    links = int(100e9 // link_bytes)
    for number in range(links):
        root = store.folder / (number // 32).to_bytes(32).hex()
        root.mkdir(exist_ok=True)
        with (root / number.to_bytes(32).hex()).open("wb") as file:
            file.truncate(link_bytes)
    begin_s = time.perf_counter()
    store = open_store(folder / "sparse", {"made": "by bench"}, 1 << 40)
    opened_s = time.perf_counter() - begin_s
    store.look(store.limit_bytes)
    looked_s = time.perf_counter() - begin_s - opened_s
    return {"links": store.links, "bytes": store.used_bytes, "open_s": opened_s, "look_s": looked_s}


def main() -> None:
    """Measure, and write what was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="on the disk to measure; a part is removed")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", default=["store", "start", "decode", "turns"])
    parser.add_argument("--history", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--form", choices=["auto", "fp8", "int4"], default="auto")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    chunk = np.random.default_rng(0).integers(0, 2**31, (2940, 520), np.int32)
    parts: dict[str, Callable[[Path], Any]] = {
        "store": lambda folder: [
            measure_store(folder / str(number), chunk, 32) for number in range(options.repeats)
        ],
        "start": lambda folder: measure_start(folder, chunk.nbytes + 64),
        "decode": lambda folder: measure_decode(folder, 2 * options.repeats),
        "turns": lambda folder: measure_turns(
            folder, options.history, options.repeats, options.form
        ),
    }
    found = json.loads(options.output.read_text()) if options.output.exists() else {}
    found["environment"] = environment()
    for name in options.parts:
        folder = options.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for number in range(options.repeats):
            (folder / str(number)).mkdir()
        found[name] = parts[name](folder)
        shutil.rmtree(folder)
        print(name, json.dumps(found[name], indent=1))
        options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
