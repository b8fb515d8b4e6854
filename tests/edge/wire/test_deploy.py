"""`tangram deploy` with what cannot be served: it is said before a replica has to find out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import ray
from typer.testing import CliRunner

from tangram.cli import app
from tests.edge.wire.conftest import free_port
from tests.edge.wire.ray_cluster import ENVIRONMENT, OPTIONS, PATIENCE_S
from tests.edge.wire.tiny import tiny_folder
from tests.mentions import mentions

PROFILE = sorted((Path(__file__).parents[3] / "tangram/profiles").glob("*.json"))[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--profile", str(PROFILE), "--kv-retention", "0.31"], "kv_retention 0.31"),
        (["--profile", "absent.json", "--kv-retention", "0.5"], "absent.json"),
        (["--allowed-origins", "example.org"], "allowed_origins 'example.org'"),
        (["--api-key", "two words"], "api_key number 1"),
        (["--otlp-endpoint", "collector"], "otlp_endpoint 'collector'"),
        (["--gpus-per-replica", "2"], "gpus_per_replica 2"),
        (["--kv-events-topic", "t"], "kv_events_topic kv_events"),
        (["--autoscaling", '{"min_replicas": -1}'], "min_replicas"),
    ],
)
def test_wrong_options_are_told_before_ray_starts(options: list[str], message: str) -> None:
    command = ["deploy", "smollm2", "--port", str(free_port()), *options]
    ended = CliRunner().invoke(app, command)
    assert ended.exit_code == 2, ended.output
    assert mentions(ended.output, message)
    assert not ray.is_initialized()


@pytest.mark.nightly
def test_what_only_a_replica_finds_out_reaches_the_terminal(tmp_path: Path) -> None:
    """A folder without weights: its name and the reason, in one line, and no colours in a file."""
    folder = tiny_folder(tmp_path / "model")
    command = [sys.executable, "-m", "tangram", "deploy", str(folder), *OPTIONS]
    ended = subprocess.run(
        [*command, "--kv-retention", "1.0", "--port", str(free_port())],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert ended.returncode == 2, ended.stderr
    (told,) = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert str(folder) in told and "replica" in told
    assert "\033" not in ended.stdout + ended.stderr
