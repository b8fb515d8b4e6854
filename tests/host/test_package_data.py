"""What is not code comes with an installed package, too."""

from __future__ import annotations

import tomllib
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_data_file_is_in_the_wheel() -> None:
    told = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
        "package-data"
    ]
    found = (
        path
        for path in (ROOT / "tangram").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    )
    files = [path for path in found if path.suffix != ".py"]
    packages = {path: ".".join(path.parent.relative_to(ROOT).parts) for path in files}
    left_out = [
        path for path, package in packages.items() if not _named(path, told.get(package, []))
    ]
    assert files and not left_out
    assert all((path.parent / "__init__.py").exists() for path in files), "only packages are found"


def _named(path: Path, patterns: list[str]) -> bool:
    return any(fnmatch(path.name, pattern) for pattern in patterns)
