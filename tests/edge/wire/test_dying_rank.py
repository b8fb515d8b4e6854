"""A server whose model lies on two devices ends when one of them fails, and says which."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from transformers import LlamaConfig

from bench.bare_tokenizer import load_tokenizer
from tests.edge.wire.conftest import free_port, healthy, wait_until
from tests.small_engines import tiny_model

OPTIONS = (
    "--tensor-parallel-size 2 --device cpu --dtype float32 --threads 1 --kv-retention 1.0 "
    "--chunk-tokens 32 --page-tokens 8 --kv-cache-gib 0.01 --max-num-batched-tokens 96"
)


def rank_of(process: int) -> int:
    """The process of the one rank that `process` has started."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = re.sub(r"\(.*\)", "", (entry / "stat").read_text()).split()
            command = (entry / "cmdline").read_text()
        except OSError:
            continue
        if int(fields[2]) == process and "rank_process" in command:
            return int(entry.name)
    raise AssertionError(f"process {process} has started no rank")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, tokenizer = tmp_path_factory.mktemp("tiny"), load_tokenizer("smollm2")
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    )
    tiny_model(config, tokenizer).model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.nightly
@pytest.mark.parametrize("answering", [False, True], ids=["idle", "answering"])
def test_a_server_ends_with_the_name_of_the_rank_that_died(
    checkpoint: Path, answering: bool
) -> None:
    """An answer that runs ends with an error."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "tangram", "serve", str(checkpoint), "--port", str(port)]
    with subprocess.Popen(
        [*command, *OPTIONS.split()], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as server:
        wait_until(
            lambda: server.poll() is not None or healthy(url), "the server is not healthy", 120
        )
        rank = rank_of(server.pid)
        if answering:
            (model,) = httpx.get(f"{url}/v1/models", timeout=30).json()["data"]
            body = {"model": model["id"], "prompt": [5] * 40, "max_tokens": 3000}
            body |= {"stream": True, "ignore_eos": True}
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
                lines = answer.iter_lines()
                next(lines)
                os.kill(rank, signal.SIGKILL)
                told = list(lines)
            assert any('"error"' in line for line in told), told[-5:]
        else:
            os.kill(rank, signal.SIGKILL)
        written, _ = server.communicate(timeout=90)
    assert server.returncode != 0
    assert re.search(rf"rank 1 of 2\b.*\b{rank}\b.*signal 9", written)
