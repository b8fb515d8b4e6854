"""Trials of a server's start with a profile that is not for it: it never listens, and says which
field is wrong.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import LlamaConfig
from typer.testing import CliRunner

from tangram.cli import app
from tangram.compress.profile import Profile
from tangram.model.load import load_model
from tests.mentions import mentions
from tests.small_engines import profile_file

from .conftest import free_port
from .test_process import ROOT
from .tiny import tiny_folder

Content = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def profile(folder: Path) -> Path:
    """One that fits."""
    return Path(profile_file(load_model(str(folder), load_format="dummy"), folder))


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of a model with half the heads and a layer more."""
    other = tmp_path_factory.mktemp("other")
    LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    ).save_pretrained(other)
    return Path(profile_file(load_model(str(other), load_format="dummy"), other))


def ask_server(folder: Path, profile: Path, *more: str) -> tuple[list[str], int]:
    """A server of `profile` on a port of its own."""
    port = free_port()
    options = {
        "--load-format": "dummy",
        "--port": str(port),
        "--chunk-tokens": "32",
        "--page-tokens": "8",
        "--heads-per-page": "2",
        "--kv-cache-gib": "0.01",
        "--max-num-batched-tokens": "128",
        "--kv-retention": "0.5",
        "--profile": str(profile),
    }
    given = [part for option in options.items() for part in option]
    return ["serve", str(folder), *given, *more], port


def nobody_listens(port: int) -> bool:
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/health")
    return True


def refusal(folder: Path, profile: Path, *more: str) -> str:
    """What the command says, after it has ended with 2 and nobody listens."""
    command, port = ask_server(folder, profile, *more)
    ended = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
    assert ended.exit_code == 2 and isinstance(ended.exception, SystemExit), ended.exception
    assert nobody_listens(port)
    return " ".join(ended.stderr.split())


def test_a_process_ends_with_a_profile_that_is_not_for_it(
    python: list[str], folder: Path, foreign: Path
) -> None:
    command, port = ask_server(folder, foreign)
    ended = subprocess.run(
        [*python, "-m", "tangram", *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"},
    )
    assert ended.returncode == 2, "starting it again does not help"
    assert nobody_listens(port)
    assert "Traceback" not in ended.stderr
    assert mentions(ended.stderr.splitlines()[-1], "layers 3 2")


def test_a_profile_of_another_model_is_named_by_what_differs(folder: Path, foreign: Path) -> None:
    assert mentions(refusal(folder, foreign), "layers 3 2 kv_heads 4")


def test_a_profile_for_other_options_is_named_by_what_differs(folder: Path, profile: Path) -> None:
    said = refusal(folder, profile, "--chunk-tokens", "64", "--scope", "layer")
    assert mentions(said, "chunk_tokens 32 64 scope 'model' 'layer'")


def _with_nan(content: Content) -> None:
    content["mean"][1][2] = float("nan")


def _a_row_short(content: Content) -> None:
    content["mean"] = content["mean"][:1]


def _a_head_short(content: Content) -> None:
    content["std"] = [row[:3] for row in content["std"]]


def _a_group_short(content: Content) -> None:
    content["sealed_pages"] = content["sealed_pages"][:-1]


def _edit(content: Content) -> None:
    content["alpha"] = content["alpha"] + 0.5


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (_with_nan, "mean.1.2 NaN"),
        (_a_row_short, "mean [2 layers][4 heads]"),
        (_a_head_short, "std [2 layers][4 heads]"),
        (_a_group_short, "sealed_pages"),
        (_edit, "checksum"),
    ],
)
def test_a_damaged_profile_is_named_by_file_and_field(
    folder: Path, profile: Path, tmp_path: Path, damage: Callable[[Content], None], named: str
) -> None:
    content = json.loads(profile.read_text())
    damage(content)
    damaged = tmp_path / "damaged.json"
    damaged.write_text(json.dumps(content))
    said = refusal(folder, damaged)
    assert mentions(said, f"{damaged.name} {named}")


def test_the_profile_itself_is_sound(profile: Path) -> None:
    assert Profile.load(profile).kv_retention == 0.5
