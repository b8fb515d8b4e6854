"""The page's endpoints over the embedded model, the options that say who sees them, and how the
server ends while somebody watches.
"""

from __future__ import annotations

import signal
import socket
import subprocess
from base64 import b64decode
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.edge.wire.conftest import CHAT, USER, free_port, healthy, run_real_server, wait_until

ROOT = Path(__file__).parents[3]
SCRIPT = """
import sys
from tangram.serve.options import Visibility
from tangram.web.access import Access
from tests.edge.wire.fake_engine import serve_fake
from tests.edge.wire.watched_engine import ObservedFakeEngine
access = Access(Visibility.auto, "127.0.0.1")
serve_fake(ObservedFakeEngine(), int(sys.argv[1]), shutdown_grace_s=60, page=access)
"""
SMALL = ("--kv-cache-gib", "0.1")
SHOWN = ("/", "/learn", "/page/index.html", "/v1/kv/model")


def read_kept(client: httpx.Client, name: str, chunk: int) -> np.ndarray[Any, Any]:
    """bool [L, H, C]: what the heads keep of a chunk."""
    told = client.get(f"/v1/kv/requests/{name}/kept?chunk={chunk}").json()
    shape = told["layers"], told["kv_heads"], told["tokens"]
    bits = np.unpackbits(np.frombuffer(b64decode(told["bits"]), np.uint8), bitorder="little")
    return bits[: np.prod(shape)].reshape(shape).astype(bool)


def rests(client: httpx.Client) -> bool:
    """Whether every page is free or kept for nobody."""
    states = np.frombuffer(b64decode(client.get("/v1/kv/pool").json()["states"]), np.uint8)
    return bool(np.isin(states, (0, 5)).all())


def test_turns_show_what_their_usage_says(server_url: str) -> None:
    text = (ROOT / "docs/architecture.md").read_text()[:5000]
    messages = [{"role": "user", "content": text}]
    body = {"model": "smollm2", "max_tokens": 4, "seed": 1, "messages": messages}
    with httpx.Client(base_url=server_url, timeout=120) as client:
        model = client.get("/v1/kv/model").json()
        told = []
        for _ in range(2):
            answer = client.post(CHAT, json=body).json()
            told.append((answer, client.get(f"/v1/kv/requests/{answer['id']}").json()))
            said = answer["choices"][0]["message"]["content"]
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "on"}]
        (first, one), (second, two) = told
        wait_until(lambda: rests(client), "a pool in which nothing runs")
        bits = [read_kept(client, answer["id"], 0) for answer in (first, second)]
        one_later = client.get(f"/v1/kv/requests/{first['id']}").json()
    for answer, shown in told:
        usage = answer["usage"]
        assert shown["prompt_tokens"] == usage["prompt_tokens"]
        assert shown["output_tokens"] == usage["completion_tokens"]
        assert shown["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
        assert shown["kv_bytes"] == usage["kv_bytes"]
        assert shown["kv_bytes_uncompressed"] == usage["kv_bytes_uncompressed"]
        assert len(shown["tokens"]) == usage["total_tokens"]
        assert text[:200] in "".join(token["text"] for token in shown["tokens"])
        assert shown["raw"]["end"] == usage["total_tokens"] - 1, "the newest has no entry yet"
        assert [chunk["recorded"] for chunk in shown["chunks"]] == [True] * shown["sealed_chunks"]
    assert two["cached_tokens"] >= one["sealed_chunks"] * model["chunk_tokens"] > 0
    assert one["conversation"] == two["conversation"]
    assert one["scorer"] == two["scorer"] == "fastkvzip"
    assert {chunk["in"] for chunk in one_later["chunks"]} == {"device"}
    budgets = next(entry["budgets"] for entry in model["retentions"] if entry["default"])
    assert bits[0].sum(axis=2).tolist() == budgets
    assert (bits[0] == bits[1]).all() and bits[0][..., :4].all(), "sinks stay"


def test_a_lossless_request_keeps_all(server_url: str) -> None:
    body = {"model": "smollm2", "max_tokens": 1, "kv_retention": 1.0, "prompt": "again and " * 300}
    with httpx.Client(base_url=server_url, timeout=120) as client:
        name = client.post("/v1/completions", json=body).json()["id"]
        shown = client.get(f"/v1/kv/requests/{name}").json()
        assert (shown["kv_retention"], shown["scorer"]) == (1.0, None)
        assert shown["kv_bytes"] >= shown["kv_bytes_uncompressed"]
        assert read_kept(client, name, 0).all()


def own_address() -> str:
    """An address of this machine that is not loopback, if it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has no address but the loopback's")
        return str(probe.getsockname()[0])


def check_chat(url: str) -> None:
    body = {"model": "smollm2", "max_tokens": 1, "messages": [USER]}
    answer = httpx.post(f"{url}{CHAT}", json=body, timeout=60)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 1


def test_a_server_may_have_no_page(python: list[str]) -> None:
    with run_real_server("--no-page", *SMALL, python=python) as url:
        for path in SHOWN:
            assert httpx.get(f"{url}{path}").status_code == 404
        check_chat(url)


@pytest.mark.parametrize(("page", "status"), [("open", 200), ("auto", 403)])
def test_the_option_says_who_sees_the_page(page: str, status: int, python: list[str]) -> None:
    """Clients that come by another address than the loopback's; all may talk to the model."""
    address = own_address()
    with run_real_server("--host", "0.0.0.0", "--page", page, *SMALL, python=python) as url:
        far = url.replace("127.0.0.1", address)
        for path in SHOWN:
            assert httpx.get(f"{far}{path}").status_code == status
            assert httpx.get(f"{url}{path}").status_code == 200
        check_chat(far)


def test_a_watcher_does_not_hold_up_the_end(python: list[str]) -> None:
    port = free_port()
    url, command = f"http://127.0.0.1:{port}", [*python, "-c", SCRIPT, str(port)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_until(lambda: healthy(url), "the server is not healthy", timeout_s=30)
            with httpx.stream("GET", f"{url}/v1/kv/events", timeout=30) as response:
                lines = response.iter_lines()
                assert next(lines) == "event: hello"
                process.send_signal(signal.SIGTERM)
                list(lines)
            _, log = process.communicate(timeout=30)  # the grace is a minute
        finally:
            process.kill()
    assert process.returncode == 0 and "Traceback" not in log
