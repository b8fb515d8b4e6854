"""docs/structure.md names what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/structure.md").read_text()
PACKAGES = (
    *("cache", "plan", "compress", "kernels", "model", "engine", "serve"),
    *("calibrate", "cli", "speculate", "web", "ray", "routing", "kv_events"),
)


def section(package: str) -> str:
    """What the page says under the heading that names `package`."""
    (found,) = re.findall(
        rf"^### [^\n]*\b{package}\b(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL
    )
    return str(found)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_is_named(package: str) -> None:
    modules = {path.name for path in (ROOT / "tangram" / package).glob("*.py")} - {"__init__.py"}
    missing = {name for name in modules if f"{name}`" not in section(package)}
    assert not missing


def test_every_folder_of_the_lab_is_named() -> None:
    lab = ROOT / "lab/tangram_lab"
    folders = {f"{path.parent.name}/" for path in lab.glob("*/__init__.py")}
    names = folders | {path.name for path in lab.glob("*.py")} - {"__init__.py"}
    missing = {name for name in names if f"`{name}`" not in section("lab")}
    assert not missing


def test_every_file_that_is_named_exists() -> None:
    folders = (ROOT / part for part in ("tangram", "lab", "bench", "tests"))
    files = {path.name for folder in folders for path in folder.rglob("*.py")}
    assert set(re.findall(r"`(?:\w+/)*(\w+\.py)`", PAGE)) <= files


def test_every_class_that_is_named_exists() -> None:
    named = set(re.findall(r"`([A-Z][a-z]+[A-Z]?\w*)`", PAGE))
    source = "".join(path.read_text() for path in (ROOT / "tangram").rglob("*.py"))
    assert {"Scheduler", "CacheManager"} <= named
    assert named <= set(re.findall(r"^class (\w+)", source, re.MULTILINE))
