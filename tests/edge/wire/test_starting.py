"""How `tangram serve` starts: its port first, then what takes time with a word about it, then how
to ask.
"""

from __future__ import annotations

import json
import shlex
import signal
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from tangram.cli.serve import first_request
from tangram.errors import ConfigError
from tangram.serve.transport.listening import Listener
from tests.mentions import mentioning, mentions

from .test_process import ROOT, options, process
from .tiny import tiny_folder

# Says whether torch was needed to find it out.
ASKED = """
import sys
from tangram.cli import app
try:
    app(sys.argv[1:])
finally:
    print("torch" in sys.modules)
"""


def read_refusal(*given: str) -> str:
    """What `tangram serve` says when it does not start, in a line."""
    command = [sys.executable, "-c", ASKED, "serve", *given]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout) == (2, "False\n"), ended.stderr
    (line,) = ended.stderr.splitlines()
    return line


def test_a_port_in_use_is_found_before_anything_is_loaded() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        port = str(other.getsockname()[1])
        assert mentions(read_refusal("--port", port), f"port {port} 127.0.0.1:{port}")


def test_addresses_that_cannot_be_had() -> None:
    with pytest.raises(ConfigError, match=mentioning("port 70000 [0, 65535]")):
        Listener.at("127.0.0.1", 70000)
    for host in ("192.0.2.1", "no such host"):
        with pytest.raises(ConfigError, match=mentioning(f"host '{host}'")):
            Listener.at(host, 0)


@pytest.mark.parametrize(("host", "is_open"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_a_listener_says_whether_all_interfaces_reach_it(host: str, is_open: bool) -> None:
    with closing(Listener.at(host, 0)) as listener:
        assert listener.is_open_to_all is is_open and "127.0.0.1" in listener.url


@pytest.mark.parametrize("host", ["", " "])
def test_an_empty_address_is_refused_with_the_one_for_all(host: str) -> None:
    with pytest.raises(ConfigError, match=mentioning("host 127.0.0.1 0.0.0.0")):
        Listener.at(host, 0)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_who_comes_early_waits(host: str) -> None:
    listener = Listener.at(host, 0)
    try:
        host, port = listener.url.removeprefix("http://").rsplit(":", 1)
        with closing(socket.create_connection((host.strip("[]"), int(port)), timeout=5)):
            pass
    finally:
        for each in listener.sockets:
            each.close()


@pytest.mark.parametrize(("chats", "locked"), [(True, False), (False, True)])
def test_the_first_request_is_one_that_a_shell_understands(chats: bool, locked: bool) -> None:
    line = first_request("http://127.0.0.1:8000/v1", "it's a model", chats=chats, locked=locked)
    assert "\n" not in line
    curl, url, *rest = shlex.split(line)
    assert (curl, url) == (
        "curl",
        f"http://127.0.0.1:8000/v1/{'chat/completions' if chats else 'completions'}",
    )
    asked = json.loads(rest[-1])
    assert asked["model"] == "it's a model" and ("messages" in asked) == chats
    assert ("Authorization: Bearer KEY" in rest) == locked


def test_a_first_start_says_what_it_does_and_ends_with_a_request_that_works(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    started = process(
        "-m", "tangram", *options(folder), start_s=120, TANGRAM_CACHE=str(tmp_path / "cache")
    )
    with started as (url, server):
        assert server.stderr is not None
        said = []
        for line in server.stderr:
            said.append(line.rstrip("\n"))
            if line.startswith("curl "):
                break
        told = [
            part
            for part in (
                f"INFO listening at {url}; loading PyTorch",
                "no profile for",
                "the calibration takes about 5 s:",
                "tokens fit",
                "INFO ready after",
            )
            if not any(part in line for line in said)
        ]
        assert not told, said
        places = [
            next(at for at, line in enumerate(said) if part in line)
            for part in (
                "listening",
                "no profile",
                "the calibration takes",
                "tokens fit",
                "ready after",
            )
        ]
        assert places == sorted(places)
        _, address, *rest = shlex.split(said[-1])
        answer = httpx.post(
            address, content=rest[-1], headers={"Content-Type": "application/json"}, timeout=30
        )
        assert answer.status_code == 200
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=20) == 0
