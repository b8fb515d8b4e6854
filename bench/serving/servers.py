"""Servers that `bench.serving.compare --http` measures: real ones, in processes of their own.

Their models have random weights, and a tokenizer in whose text each token is a word of its own. So
the text of an answer says which tokens came in which chunk, and no field that users rarely ask for
is needed.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bench.serving.competitors import read_vocab_size
from bench.serving.streams import ClientCost, Post, StreamClients, StreamedAnswer
from tangram_lab.load.asks import Ask
from tangram_lab.load.clock import GivenUpError, Patience, TimedAnswer

START_S, STOP_S, LOOK_EVERY_S = 600.0, 40.0, 0.2
NAME = "measured"  # of the model in requests
LOG_LINES = 30  # of a server that does not start


@dataclass(frozen=True)
class ServerKind:
    """How servers of one kind are started and read.

    `module` is what `python -m` runs, `ready` the path that answers 200 when the server does,
    `processes` the option for the number of API processes. `is_engine` knows the processes
    that compute by their command lines. `count_fitting` reads from /metrics how many tokens fit.
    """

    module: tuple[str, ...]
    ready: str
    processes: str
    is_engine: Callable[[str], bool]
    count_fitting: Callable[[str], int]
    own_options: tuple[str, ...] = ()


def _samples(metrics: str, name: str) -> Iterator[Any]:
    for family in text_string_to_metric_families(metrics):
        yield from (sample for sample in family.samples if sample.name == name)


def _count_of_tangram(metrics: str) -> int:
    return int(next(_samples(metrics, "tangram_kv_capacity_tokens")).value)


def _count_of_vllm(metrics: str) -> int:
    blocks = next(_samples(metrics, "vllm:cache_config_info")).labels
    return int(blocks["num_gpu_blocks"]) * int(blocks["block_size"])


KINDS = {
    "tangram": ServerKind(
        ("tangram", "serve"),
        "/ready",
        "api_processes",
        # The others accept requests, or render the conversations of those that do.
        lambda line: not any(name in line for name in ("api_process", "template_process")),
        _count_of_tangram,
    ),
    "vllm": ServerKind(
        ("vllm.entrypoints.cli.main", "serve"),
        "/health",
        "api_server_count",
        # The others are API servers, or start them.
        lambda line: line.startswith(("VLLM::EngineCore", "VLLM::Worker")),
        _count_of_vllm,
        ("--enable-prompt-tokens-details",),  # as ours says by itself what came from the cache
    ),
}


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A tokenizer whose token 255 is the text " ff", and so on: byte-level, as most are."""
    names = {f"Ġ{token:x}": token for token in range(vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab=names, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def read_tokens(text: str) -> list[int]:
    """The tokens of a text of `write_tokenizer`'s."""
    return [int(word, 16) for word in text.split()]


def spell_options(options: Mapping[str, Any]) -> list[str]:
    """Options of an engine as those of its command; what is None is left out."""
    spelled = []
    for name, value in options.items():
        word = name.replace("_", "-")
        if isinstance(value, bool):
            spelled.append(f"--{word}" if value else f"--no-{word}")
        elif value is not None:
            spelled += [f"--{word}", str(value)]
    return spelled


def spell_command(kind: ServerKind, model: str, options: Sequence[str]) -> list[str]:
    """The command that serves `model`, without a port."""
    named = [model, "--served-model-name", NAME]
    return [sys.executable, "-m", *kind.module, *named, *kind.own_options, *options]


@dataclass(frozen=True)
class MeasuredServer:
    """A running server: its port, and its first process."""

    kind: ServerKind
    port: int
    process: subprocess.Popen[bytes]

    def get(self, path: str) -> httpx.Response:
        """What the server says there."""
        return httpx.get(f"http://127.0.0.1:{self.port}{path}", timeout=30)

    def cpu_seconds(self) -> dict[str, float]:
        """The processor's time so far, of `engine` and of the API processes, `api`."""
        return self._sum_up(lambda one: one.cpu_times().user + one.cpu_times().system)

    def memory_bytes(self) -> dict[str, float]:
        """Their memory, in which pages of several processes are shared out (PSS)."""
        return self._sum_up(lambda one: float(one.memory_full_info().pss))

    def _sum_up(self, read: Callable[[psutil.Process], float]) -> dict[str, float]:
        found = {"engine": 0.0, "api": 0.0}
        for process in self._tree():
            with suppress(psutil.Error):  # it has just ended
                role = "engine" if self.kind.is_engine(" ".join(process.cmdline())) else "api"
                found[role] += read(process)
        return found

    def wait_until_ready(self) -> None:
        """Raises `SystemExit` if the server ends, or is not ready in time."""
        until_s = time.monotonic() + START_S
        while time.monotonic() < until_s and self.process.poll() is None:
            try:
                if self.get(self.kind.ready).status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(LOOK_EVERY_S)
        raise SystemExit(f"the server is not ready, its exit code is {self.process.poll()}")

    def end(self) -> None:
        """End all its processes, by force if they take long."""
        tree = self._tree() if self.process.poll() is None else []
        self.process.terminate()
        _, left = psutil.wait_procs(tree, STOP_S)
        for process in left:
            process.kill()
        self.process.wait()

    def _tree(self) -> list[psutil.Process]:
        first = psutil.Process(self.process.pid)
        return [first, *first.children(recursive=True)]


@contextmanager
def run_server(
    kind: ServerKind, model: str, options: Sequence[str], log: Path, **environment: str
) -> Iterator[MeasuredServer]:
    """A server of `model`, a folder or a name, that is ready; its output goes to `log`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [*spell_command(kind, model, options), "--port", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | environment
        )
    server = MeasuredServer(kind, port, process)
    try:
        server.wait_until_ready()
        yield server
    except SystemExit:
        print(*log.read_text(errors="replace").splitlines()[-LOG_LINES:], sep="\n", file=sys.stderr)
        raise
    finally:
        server.end()


class HttpEngine:
    """A server under load; see `ServingEngine`. `close` it at the end.

    Other requests than those since the last `clear_cache` have another salt: their prefixes are not
    found, though what they hold stays until the memory is needed, as in every server.
    """

    def __init__(
        self,
        engine: str,
        model: Path,
        options: dict[str, Any],
        log: Path,
        clients: int,
        api_processes: int | None = None,
    ) -> None:
        self.vocab_size, self._salt, self.costs = read_vocab_size(model), 0, dict[str, Any]()
        kind = KINDS[engine]
        with ExitStack() as opened:
            folder = Path(opened.enter_context(TemporaryDirectory(prefix="served-")))
            shutil.copy(model / "config.json", folder)
            write_tokenizer(folder, self.vocab_size)
            given = options | {kind.processes: api_processes}
            self._server = opened.enter_context(
                run_server(kind, str(folder), spell_options(given), log, HF_HUB_OFFLINE="1")
            )
            self._clients = StreamClients(self._server.port, clients)
            opened.callback(self._clients.close)
            fitting = kind.count_fitting(self._server.get("/metrics").text)
            self.options = given | {"fits_tokens": fitting, "clients": clients}
            self._opened = opened.pop_all()

    def close(self) -> None:
        """End the clients and the server."""
        self._opened.close()

    def clear_cache(self) -> None:
        """See `ServingEngine`."""
        self._salt += 1

    def answer_all(
        self, asks: Sequence[Ask], patience: Patience | None = None
    ) -> list[TimedAnswer]:
        """See `ServingEngine`. `costs` are then those of these answers."""
        posts = [Post("/v1/completions", self._spell(ask), ask.at_s) for ask in asks]
        try:
            answers, clients, before, after = self._clients.answer_all(
                posts, self._server.cpu_seconds, patience
            )
        except GivenUpError:
            self.answer_all([Ask((0,), 1)])  # waits until the server has let go of the others
            raise
        used = {role: after[role] - before[role] for role in after}
        timed = [time_answer(ask, answer) for ask, answer in zip(asks, answers, strict=True)]
        self.costs = describe_costs(used, answers, clients)
        if patience is not None:
            end_s = max(answer.times_s[-1] for answer in timed)
            if patience.ends(timed, end_s):
                raise patience.give_up(timed, end_s)
        return timed

    def _spell(self, ask: Ask) -> dict[str, Any]:
        return {
            "model": NAME,
            "prompt": ask.tokens,
            "max_tokens": ask.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_salt": f"run {self._salt}",
            "stream": True,
            "stream_options": {"include_usage": True},
        }


def time_answer(ask: Ask, answer: StreamedAnswer) -> TimedAnswer:
    """The tokens of an answer and their times. Raises `SystemExit` if it is not what was asked."""
    timed = TimedAnswer(ask.at_s, len(ask.tokens), cached_tokens=answer.cached_tokens)
    for at_s, text in zip(answer.times_s, answer.texts, strict=True):
        tokens = read_tokens(text)
        timed.times_s += [at_s] * len(tokens)
        timed.token_ids += tokens
    found = (answer.prompt_tokens, answer.completion_tokens, answer.finish_reason)
    wanted = (len(ask.tokens), ask.output_tokens, "length")
    if found != wanted or len(timed.token_ids) != ask.output_tokens:
        raise SystemExit(
            f"an answer has {found} as prompt tokens, tokens and end, and {len(timed.token_ids)} "
            f"tokens in its text; {wanted} was asked for"
        )
    return timed


def describe_costs(
    used_s: Mapping[str, float], answers: Sequence[StreamedAnswer], clients: Sequence[ClientCost]
) -> dict[str, Any]:
    """What a run cost processors: seconds of the server's processes, µs of a token in all API
    processes and of a chunk in the clients, and the share of its time in which the busiest client
    computed (near 1, the clients are measured and not the server).
    """
    tokens = sum(answer.completion_tokens for answer in answers)
    chunks = sum(len(answer.times_s) for answer in answers)
    return {
        "cpu_s": dict(used_s),
        "api_us_a_token": 1e6 * used_s["api"] / tokens,
        "chunks": chunks,
        "client_us_a_chunk": 1e6 * sum(client.cpu_s for client in clients) / chunks,
        "busiest_client": max(client.cpu_s / client.seconds for client in clients),
    }
