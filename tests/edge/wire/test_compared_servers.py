"""A server as `bench.serving.compare --http` measures it: started, asked by clients, ended."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.serving.servers import HttpEngine
from bench.serving.streams import Post, StreamClients
from tangram_lab.load.asks import Ask, alike
from tangram_lab.load.clock import GivenUpError, Patience
from tests.mentions import mentioning

from .tiny import CHUNK, VOCABULARY, tiny_folder

OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "dtype": "float32",
    "kv_retention": 1.0,
    "chunk_tokens": CHUNK,
    "max_model_len": 512,
    "max_num_seqs": 4,
    "kv_cache_gib": 0.01,
}


def command_lines(processes: Iterable[psutil.Process]) -> list[str]:
    """Those of the processes that still run."""
    lines = []
    for process in processes:
        with suppress(psutil.Error):
            lines.append(" ".join(process.cmdline()))
    return lines


def test_a_server_is_measured_and_nothing_of_it_is_left(tmp_path: Path) -> None:
    model = tiny_folder(tmp_path / "tiny")
    before = set(psutil.Process().children(recursive=True))
    engine = HttpEngine("tangram", model, OPTIONS, tmp_path / "log", clients=2, api_processes=2)
    with closing(engine):
        asks = alike(5, 70, 9, shared_tokens=0, vocab_size=VOCABULARY)
        answers = engine.answer_all(asks)
        assert [len(answer.token_ids) for answer in answers] == [9] * 5
        assert all(answer.times_s == sorted(answer.times_s) for answer in answers)
        assert not any(answer.cached_tokens for answer in answers)
        assert engine.costs["cpu_s"].keys() == {"engine", "api"}
        assert engine.costs["api_us_a_token"] > 0 and engine.costs["chunks"] <= 5 * 9
        assert 0 < engine.costs["busiest_client"] < 1 and engine.options["fits_tokens"] > 512

        # Patience that is lost ends all requests; the server answers others afterwards.
        many = alike(24, 70, 400, shared_tokens=0, vocab_size=VOCABULARY)
        with pytest.raises(GivenUpError, match=mentioning("24")):
            engine.answer_all(many, Patience(ttft_s=0.05, every_s=0.05))

        # The same tokens come again, and a turn that follows them finds what they left.
        history = asks[0].tokens + tuple(answers[0].token_ids)
        (again,) = engine.answer_all([Ask(asks[0].tokens, 9)])
        (later,) = engine.answer_all([Ask((*history, 5), 2)])
        assert again.token_ids == answers[0].token_ids
        assert again.cached_tokens and later.cached_tokens >= again.cached_tokens
        engine.clear_cache()
        (fresh,) = engine.answer_all([Ask(asks[0].tokens, 9)])
        assert fresh.token_ids == again.token_ids and fresh.cached_tokens == 0
        started = set(psutil.Process().children(recursive=True)) - before
        assert sum("tangram.link.api_process" in line for line in command_lines(started)) == 2
    # What multiprocessing keeps for the next clients stays, wherever its Python lies.
    left = command_lines(started)
    ours = ("-m tangram", "template_process", "spawn_main")
    assert not [line for line in left if any(name in line for name in ours)]


def test_clients_leave_a_server_that_does_not_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        clients = StreamClients(silent.getsockname()[1], 2)
        with closing(clients):
            posts = [Post("/v1/completions", {})] * 3 + [Post("/v1/completions", {}, at_s=60.0)]
            with pytest.raises(GivenUpError, match=r"3 were sent, half of them waited 0\.[2-9]"):
                clients.answer_all(posts, dict, Patience(ttft_s=0.2, every_s=0.1))
            for _ in range(3):
                connection, _ = silent.accept()
                with connection, suppress(ConnectionResetError):
                    while connection.recv(1000):
                        pass


def test_a_server_that_does_not_start_says_why(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = tiny_folder(tmp_path / "tiny")
    with pytest.raises(SystemExit, match=mentioning("code 2")):
        HttpEngine("tangram", model, OPTIONS | {"max_num_seqs": 0}, tmp_path / "log", clients=1)
    assert "max_num_seqs is 0" in capfd.readouterr().err
