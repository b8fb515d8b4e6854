"""What is not code comes with an installed package, too."""

from __future__ import annotations

import tomllib
from fnmatch import fnmatch
from pathlib import Path

from tangram.version import __version__

ROOT = Path(__file__).parents[2]


def test_the_lab_is_of_the_version_that_it_measures() -> None:
    told = tomllib.loads((ROOT / "lab" / "pyproject.toml").read_text())["project"]
    assert told["version"] == __version__
    assert told["dependencies"] == [f"tangram-serve=={__version__}"]


def test_the_plugin_is_of_the_version_that_it_imports() -> None:
    told = tomllib.loads((ROOT / "plugins" / "vllm" / "pyproject.toml").read_text())["project"]
    assert told["version"] == __version__


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
    left_out = [path for path in files if not _is_named(path, told)]
    assert files and not left_out


def _is_named(path: Path, told: dict[str, list[str]]) -> bool:
    """Whether the package around `path`, the innermost one, names it."""
    folder = next(parent for parent in path.parents if (parent / "__init__.py").exists())
    patterns = told.get(".".join(folder.relative_to(ROOT).parts), [])
    return any(fnmatch(str(path.relative_to(folder)), pattern) for pattern in patterns)
