"""A load under which everything moves that is measured: queue, preemption, reuse, host memory,
compression, aborts, drafts.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from .conftest import COMPLETIONS, run_real_server, scrape, wait_until

# Hardly more than one sequence fits, two may run, three are asked; host memory takes a chunk or
# two.
OPTIONS = (
    "--dtype",
    "float32",
    "--kv-cache-gib",
    "0.05",
    "--max-model-len",
    "1100",
    "--max-num-seqs",
    "2",
    "--max-num-batched-tokens",
    "1024",
    "--kv-offload-gib",
    "0.025",
    "--metrics-aliases",
    "vllm",
    "--overflow-every",
    "1",
    "--unknown-fields",
    "warn",
    "--speculative-config",
    '{"method": "ngram"}',
)


class WatchedServer:
    """A real server and every reading of its metrics."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.readings: list[dict[tuple[str, tuple[tuple[str, str], ...]], float]] = []
        self.families: dict[str, Metric] = {}
        self._done = threading.Event()

    def read(self) -> None:
        """Take a reading; `families` keeps what was ever there."""
        found = list(
            text_string_to_metric_families(httpx.get(f"{self.url}/metrics", timeout=30).text)
        )
        self.families |= {family.name: family for family in found}
        self.readings.append(
            {
                (sample.name, tuple(sorted(sample.labels.items()))): sample.value
                for family in found
                for sample in family.samples
            }
        )

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Read again and again while inside."""

        def again() -> None:
            while not self._done.wait(0.05):
                self.read()

        self.read()
        watcher = threading.Thread(target=again)
        watcher.start()
        try:
            yield
        finally:
            self._done.set()
            watcher.join()
            self.read()


def prompt(count: int, step: int) -> list[int]:
    return [100 + (at * step) % 5000 for at in range(count)]


def ask(url: str, tokens: list[int], **fields: object) -> httpx.Response:
    asked = {
        "model": "smollm2",
        "prompt": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "max_tokens": 24,
    } | fields
    return httpx.post(url + COMPLETIONS, json=asked, timeout=120)


def leave_early(url: str, tokens: list[int]) -> None:
    """Ask for all that fits, read twenty tokens, hang up."""
    asked = {
        "model": "smollm2",
        "prompt": tokens,
        "ignore_eos": True,
        "stream": True,
        "max_tokens": 560,
    }
    with httpx.stream("POST", url + COMPLETIONS, json=asked, timeout=120) as response:
        for _ in zip(range(40), response.iter_lines(), strict=False):  # every other line is empty
            pass


def load(url: str) -> None:
    """Two that outgrow the pool together while one waits; then others, and back again, so that
    chunks fall out of the pool, out of host memory too, and come back.
    """
    with ThreadPoolExecutor(3) as pool, httpx.Client(base_url=url, timeout=30) as client:
        early = [pool.submit(leave_early, url, prompt(500, step)) for step in (7, 11)]
        # A short one that came now would have the second place, and nothing would be outgrown.
        wait_until(
            lambda: scrape(client)["tangram_requests_running", ""] == 2,
            "two do not run together",
            60,
        )
        assert pool.submit(ask, url, prompt(60, 13)).result().status_code == 200
        for each in early:
            each.result()
    assert ask(url, prompt(9, 5), max_tokens=1, best_of=2).status_code == 200
    for step in (17, 19, 23, 29, 31, 37, 19, 17):
        assert ask(url, prompt(520, step), max_tokens=2).status_code == 200


@contextmanager
def loaded_server(python: Sequence[str]) -> Iterator[WatchedServer]:
    """The server after that load."""
    with run_real_server(*OPTIONS, python=python) as url:
        watched = WatchedServer(url)
        with watched.watching():
            load(url)
        yield watched
