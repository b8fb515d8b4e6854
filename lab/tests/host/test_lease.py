"""What `bench/serving/lease.sh` runs for the engines that it is given."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "bench" / "serving" / "lease.sh"


def run_lease(folder: Path, *engines: str, **variables: str) -> list[list[str]]:
    """The arguments of each command but the last, which prints the table."""
    commands = folder / "commands"
    python = folder / "python3"
    python.write_text(f'#!/bin/sh\necho "$PYTHONPATH" "$@" >> {commands}\n')
    python.chmod(0o755)
    given = os.environ | variables | {"PATH": f"{folder}:{os.environ['PATH']}"}
    subprocess.run(
        ["bash", SCRIPT, folder, *engines], env=given, check=True, stdout=subprocess.PIPE
    )
    *measured, table = [line.split() for line in commands.read_text().splitlines()]
    assert table[1:] == ["-m", "bench.serving.lease_table", str(folder)]
    return measured


@pytest.mark.parametrize(
    ("engine", "options"),
    [
        ("vllm", ["vllm"]),
        ("http-vllm-fp8", ["--http", "--kv-cache-dtype", "fp8", "vllm"]),
        ("http-vllm-host", ["--http", "--offload-gib", "64", "vllm"]),
        ("http-vllm-api4", ["--http", "--api-processes", "4", "vllm"]),
        (
            "0.25-fp8-host",
            ["--kv-cache-dtype", "fp8", "--offload-gib", "64", "tangram", "--kv-retention", "0.25"],
        ),
    ],
)
def test_an_engine_and_its_variants_are_options(
    engine: str, options: list[str], tmp_path: Path
) -> None:
    ((site, *command),) = run_lease(tmp_path, engine, VLLM_SITE="/of/vllm", TANGRAM_SITE="/of/us")
    begin, end = command.index("bench.serving.compare") + 1, command.index("--cases")
    assert command[begin:end] == options
    assert site.split(":")[0] == ("/of/vllm" if "vllm" in engine else "/of/us")
    assert command[command.index("--series") + 1].startswith(
        "served" if "http" in engine else "serving"
    )


def test_a_trace_is_searched_for_its_fastest_speed(tmp_path: Path) -> None:
    variables = {"CASES": "trace", "TRACE": "/t.jsonl", "SPEEDS": "0.4,0.6"}
    ((_, *command),) = run_lease(tmp_path, "http-1", **variables)
    asked = " ".join(command)
    assert "--trace /t.jsonl --seconds 120 --speeds 0.4,0.6 --within 0.05" in asked
    assert "--cases trace " in asked and "--max-model-len 131072" in asked


def test_an_engine_of_an_unknown_variant_costs_the_others_nothing(tmp_path: Path) -> None:
    ((_, *command),) = run_lease(tmp_path, "vllm-fp4", "vllm")
    assert "vllm" in command and "fp4" not in command
