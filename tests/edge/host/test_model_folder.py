"""What a model's folder must hold is said before anything is loaded, without a network."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from typer.testing import CliRunner

from tangram.cli import app
from tangram.errors import ModelError
from tangram.model.source import check_source, find_folder
from tests.mentions import mentioning, mentions

NAMES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def run(*given: str) -> tuple[int, str]:
    """The exit code of a command, and what it says of errors."""
    result = CliRunner().invoke(app, list(given), env={"COLUMNS": None})
    return result.exit_code, result.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files of a model."""
    model = tmp_path / "model"
    model.mkdir()
    for name in NAMES:
        (model / name).write_text("{}")
    check_source(str(model))
    return model


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking the Hub fails the test."""

    def fail(*given: object, **options: object) -> None:
        raise AssertionError("the Hub was asked")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)


def make_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # names of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(path.name)
    finally:
        os.chdir(here)


@pytest.mark.parametrize(
    "make",
    [
        os.mkfifo,
        make_socket,
        Path.mkdir,
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.symlink_to("gone"),
        lambda path: path.symlink_to(path),
    ],
    ids=["pipe", "socket", "folder", "device", "dangling", "loop"],
)
@pytest.mark.parametrize(
    "name",
    [
        *NAMES,
        "model.safetensors.index.json",
        "generation_config.json",
        "chat_template.jinja",
        "tokenizer.model",
        "additional_chat_templates/tool.jinja",
    ],
)
def test_every_file_of_a_model_is_a_regular_one(
    name: str, make: Callable[[Path], object], folder: Path
) -> None:
    """Reading a pipe would wait for ever."""
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    make(path)
    with pytest.raises(ModelError, match=mentioning(f"{path.name}")):
        check_source(str(folder))
    code, said = run("generate", str(folder), "-p", "a")
    assert (code, said.count("\n")) == (2, 1) and path.name in said


def test_links_to_regular_files_are_followed(folder: Path, tmp_path: Path) -> None:
    """The Hub's own cache has nothing else."""
    linked = tmp_path / "linked"
    linked.mkdir()
    for name in NAMES:
        (linked / name).symlink_to(folder / name)
    check_source(str(linked))


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_a_gguf_file_is_a_regular_one(make: Callable[[Path], object], tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    make(path)
    with pytest.raises(ModelError, match=mentioning(f"{path} regular")):
        check_source(str(path))


def write(folder: Path, name: str, content: object = None) -> None:
    (folder / name).write_text(json.dumps(content or {}))


def remove(*names: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return change


def only_an_adapter(folder: Path) -> None:
    remove(*NAMES)(folder)
    write(folder, "adapter_config.json", {"base_model_name_or_path": "Qwen/Qwen3-4B"})


def only_a_pickle(folder: Path) -> None:
    remove("model.safetensors")(folder)
    write(folder, "pytorch_model.bin")


def only_gguf(folder: Path) -> None:
    remove(*NAMES)(folder)
    write(folder, "tiny.q4.gguf")


def lacking_shard(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    shards = {"x": "a.safetensors", "y": "b.safetensors"}
    write(folder, "model.safetensors.index.json", {"weight_map": shards})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (remove("tokenizer.json"), "tokenizer.json"),
        (remove("config.json"), "config.json"),
        (remove("model.safetensors"), "model.safetensors"),
        (only_a_pickle, "pytorch_model.bin safetensors"),
        (only_an_adapter, "LoRA Qwen/Qwen3-4B merge"),
        (
            lambda folder: write(folder, "adapter_config.json"),
            "adapter_config.json config.json adapters",
        ),
        (only_gguf, "tiny.q4.gguf"),
        (lacking_shard, "1 b.safetensors"),
    ],
)
def test_what_a_folder_lacks_is_said(
    change: Callable[[Path], None], words: str, folder: Path
) -> None:
    change(folder)
    code, said = run("generate", str(folder), "-p", "a")
    assert (code, said.count("\n")) == (2, 1) and mentions(said, words)


def weights_twice(folder: Path) -> None:
    write(folder, "a.safetensors")
    write(folder, "model.safetensors.index.json", {"weight_map": {"x": "a.safetensors"}})


def no_shards(folder: Path) -> None:
    write(folder, "model.safetensors.index.json", {"weight_map": {}})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (weights_twice, "model.safetensors twice"),
        (no_shards, "model.safetensors.index.json checksum"),
    ],
)
def test_what_two_files_say_of_weights_is_one(
    change: Callable[[Path], None], words: str, folder: Path
) -> None:
    change(folder)
    code, said = run("generate", str(folder), "-p", "a")
    assert (code, said.count("\n")) == (2, 1) and mentions(said, words)


def test_an_index_may_list_the_one_file(folder: Path) -> None:
    shards = {"x": "model.safetensors"}
    write(folder, "model.safetensors.index.json", {"weight_map": shards})
    check_source(str(folder))


@pytest.mark.parametrize(
    "config",
    [
        {"num_hidden_layers": 10**9},
        {"n_layer": 10**30},
        {"model_type": "gemma3", "text_config": {"num_hidden_layers": 10**9}},
        {"vision_config": {"depth": 10**9}},
        {"vision_config": {"num_hidden_layers": 10**9}},
        {"n_routed_experts": 10**9},
        {"num_experts": 10**9},
    ],
    ids=lambda config: " ".join(config),
)
@pytest.mark.parametrize("command", ["generate", "size"])
def test_more_layers_than_any_model_has_are_refused_at_once(
    command: str, config: dict[str, Any], folder: Path
) -> None:
    """Transformers would make an object of each, for hours, before it looks at a weight."""
    write(folder, "config.json", config)
    given = ["generate", str(folder), "-p", "a"] if command == "generate" else ["size", str(folder)]
    code, said = run(*given)
    *_, field, value = re.findall(r"\w+", str(config))
    assert (code, said.count("\n")) == (2, 1) and mentions(said, f"{field} {value} 2048")


def test_a_link_to_nowhere_is_not_what_was_meant(tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to("gone")
    (tmp_path / "model2").mkdir()
    code, said = run("generate", str(tmp_path / "model"), "-p", "a")
    assert code == 2 and said.endswith(f" {tmp_path}/model2?\n")


def test_random_weights_need_a_config_alone(folder: Path) -> None:
    remove("model.safetensors", "tokenizer.json")(folder)
    check_source(str(folder), weights=False)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("qwen3", "Qwen/Qwen3-4B"),
        ("llama3.2", "meta-llama/Llama-3.1-8B"),
        ("smollm", "smollm2?"),
        ("modle", "model?"),
        ("./modle", "model?"),
        ("zzzzzzzz", "OWNER/NAME"),
    ],
)
@pytest.mark.usefixtures("no_network")
def test_a_mistyped_name_is_answered_from_what_is_here(
    name: str, meant: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    code, said = run("generate", name, "-p", "a")
    assert (code, said.count("\n")) == (2, 1) and mentions(said, f"{name} {meant}")
    assert said.endswith("?\n") == (meant != "OWNER/NAME")
    assert name.startswith(".") or mentions(said, "smollm2; llama-3.1-8b,")


@pytest.mark.usefixtures("no_network")
def test_size_says_which_preset_is_meant() -> None:
    code, said = run("size", "qwen3")
    assert code == 2 and mentions(said, "qwen3-4b qwen3-32b?")


def make_snapshot(cache: Path, files: dict[str, Any]) -> Path:
    """A snapshot of somebody/tiny as the Hub's cache would hold it."""
    model = cache / "models--somebody--tiny"
    snapshot = model / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("0" * 40)
    for name, content in files.items():
        write(snapshot, name, content)
    return snapshot


def test_a_snapshot_is_checked_like_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    snapshot = make_snapshot(tmp_path, dict.fromkeys(NAMES))
    check_source("somebody/tiny")
    assert find_folder("somebody/tiny") == snapshot
    write(snapshot, "adapter_config.json")
    with pytest.raises(ModelError, match=mentioning("adapter_config.json adapters")):
        check_source("somebody/tiny")


@pytest.mark.parametrize("status", [500, 404])
def test_a_hub_that_fails_is_asked_once(
    status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(status)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    Path("somebody").mkdir()
    Path("somebody/tiny").mkdir()
    with HTTPServer(("127.0.0.1", 0), Hub) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        code, said = run("generate", "somebody/tinny", "-p", "a")
        server.shutdown()
    assert len(asked) == 1
    assert (code, said.count("\n")) == (2, 1) and mentions(said, "somebody/tinny")
    assert said.endswith(" somebody/tiny?\n")
