"""The container files are linted, and name what is there; none is built here."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "Dockerfile"
COMPOSE = ("compose.yaml", "compose.cuda.yaml")
EXAMPLES = ROOT / "examples" / "compose"


def services(name: str = "compose.yaml") -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / name).read_text())["services"]
    return found


def mounts(service: str) -> dict[str, Path]:
    """What a service sees of the tree, by the path it sees it under."""
    split = [volume.split(":") for volume in services()[service]["volumes"]]
    return {inside: ROOT / outside for outside, inside, *_ in split if outside.startswith(".")}


def test_the_dockerfile_passes_its_linter() -> None:
    linter = Path(sys.executable).with_name("hadolint")
    found = subprocess.run([linter, "--no-color", DOCKERFILE], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, ""), found.stdout + found.stderr


@pytest.mark.parametrize("name", COMPOSE)
def test_compose_files_follow_the_specification(name: str) -> None:
    command = ["-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", ROOT / name]
    found = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


def test_what_the_image_is_made_of_is_in_the_tree() -> None:
    text = DOCKERFILE.read_text()
    stages = re.findall(r"^FROM (\S+) AS (\S+)$", text, re.MULTILINE)
    (python,) = (
        re.fullmatch(r"python:(3\.\d+)-slim-bookworm", base)
        for base, name in stages
        if name == "base"
    )
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    assert python and f"Programming Language :: Python :: {python[1]}" in classifiers
    assert {services(name)["tangram"]["build"]["target"] for name in COMPOSE} == {"cpu", "cuda"}
    bases = {name: base for base, name in stages}
    assert bases["cpu"] == "cpu-packages" and bases["cuda"] == "cuda-packages"
    copied = [
        name
        for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE)
        for name in line.split()[:-1]
    ]
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    assert all((ROOT / name).exists() for name in copied)
    assert all(
        any(Path(name).match(line[1:]) for line in allowed if line.startswith("!"))
        for name in copied
    )
    # Nobody is root who runs it.
    assert text.split("FROM cpu-packages AS cpu")[1].rstrip().endswith("USER 1000")
    assert (
        text.split("FROM cuda-packages AS cuda\n")[1]
        .split("FROM")[0]
        .rstrip()
        .endswith("USER 1000")
    )


def test_prometheus_and_grafana_find_the_server_and_the_dashboard() -> None:
    (scraped,) = yaml.safe_load((EXAMPLES / "prometheus.yml").read_text())["scrape_configs"]
    assert scraped["static_configs"] == [{"targets": ["tangram:8000"]}]
    assert mounts("prometheus") == {"/etc/prometheus/prometheus.yml": EXAMPLES / "prometheus.yml"}
    seen = mounts("grafana")
    assert all(path.exists() for path in seen.values())
    assert seen["/etc/grafana/provisioning"] == EXAMPLES / "grafana"
    (source,) = yaml.safe_load((EXAMPLES / "grafana/datasources/prometheus.yaml").read_text())[
        "datasources"
    ]
    assert source["url"] == "http://prometheus:9090" and source["isDefault"]
    (provider,) = yaml.safe_load((EXAMPLES / "grafana/dashboards/tangram.yaml").read_text())[
        "providers"
    ]
    (dashboard,) = (
        inside for inside, path in seen.items() if path == ROOT / "examples/grafana/tangram.json"
    )
    assert Path(dashboard).parent == Path(provider["options"]["path"])
    assert (
        services()["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
        == dashboard
    )
