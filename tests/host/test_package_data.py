"""What is not code comes with an installed package, too."""

from __future__ import annotations

import tomllib
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
    named = {
        path
        for package, patterns in told.items()
        for pattern in patterns
        for path in (ROOT / package.replace(".", "/")).glob(pattern)
    }
    assert files and not set(files) - named
    packages = [ROOT / package.replace(".", "/") for package in told]
    assert all((folder / "__init__.py").exists() for folder in packages), "only packages are found"
