"""What options may hold: numbers within bounds, texts in UTF-8, files that can be written. All is
seen before work.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tangram.cli import app
from tangram.cli.checks import OUTPUTS
from tangram.config import OPTIONS, EngineConfig
from tangram.errors import ConfigError
from tangram.limits import Bounds
from tests.mentions import mentions

from .test_command_line import ALL

INPUTS = {"batch", "costs", "data", "import_from", "file", "locomo", "text", "trace"}
NUMBERS = [
    (path, param)
    for path, command in ALL.items()
    for param in command.params
    if param.type_descriptor.annotation in (int, float)
]
PATHS = [
    (path, param)
    for path, command in ALL.items()
    for param in command.params
    if param.type_descriptor.annotation is Path
]
WRITTEN = [(path, param) for path, param in PATHS if param.name in OUTPUTS]


def name(case: object) -> str:
    return " ".join(case) if isinstance(case, tuple) else str(getattr(case, "name", case))


def list_needed(path: tuple[str, ...]) -> list[str]:
    """What a command does not start without; none of it is looked at here."""
    required = [param for param in ALL[path].params if param.required]
    return (
        [word for param in required for word in (*param.opts[:1], "a")][-2:]
        if "trace" in path
        else (["a"] if required else [])
    )


def read_refusal(path: tuple[str, ...], *given: str, **options: object) -> str:
    """The one line that a command says instead of starting."""
    result: Result = CliRunner().invoke(app, [*path, *list_needed(path), *given], **options)  # type: ignore[arg-type]
    assert result.exit_code == 2 and not result.stdout, (result.output, result.exception)
    (line,) = result.stderr.splitlines()
    return line


@pytest.mark.parametrize(("path", "param"), NUMBERS, ids=name)
def test_no_number_is_taken_that_cannot_be_meant(path: tuple[str, ...], param: object) -> None:
    """Whatever option comes next: NaN, infinite, less than nothing, more than anything."""
    whole = param.type_descriptor.annotation is int  # type: ignore[attr-defined]
    least, most = (-(10**30), 10**30) if whole else (-1.0, 1e300)
    for value in (least, most, *(() if whole else ("nan", "inf", "-inf"))):
        line = read_refusal(path, f"{param.opts[0]}={value}")  # type: ignore[attr-defined]
        assert re.match(rf"error: {param.name} is \S+, .*\d", line)  # type: ignore[attr-defined]


def test_every_number_of_an_engine_has_bounds_without_the_command_line_too() -> None:
    numbers = {
        field
        for field, kind in EngineConfig.__annotations__.items()
        if kind.split()[0] in ("int", "float")
    }
    assert numbers == {name for name, option in OPTIONS.items() if option.bounds is not None}
    for field in numbers:
        for value in (float("nan"), 1e300, -1e300):
            with pytest.raises(ConfigError, match=f"{field} is "):
                EngineConfig(**{field: value})  # type: ignore[arg-type]


def test_a_refused_number_is_told_with_its_bounds() -> None:
    with pytest.raises(
        ConfigError, match=r"^x is 3, it must be greater than 0 and at most 2: 2 is all$"
    ):
        Bounds(0.0, 2.0, open_low=True).check_option("x", 3, "2 is all")
    Bounds(0.0, 2.0).check_option("x", 0.0)


def test_every_path_is_read_or_written() -> None:
    assert {param.name for _, param in PATHS} == INPUTS | set(OUTPUTS)


def write_file(path: Path) -> str:
    path.write_text("precious")
    return str(path / "out.json")


def lock(path: Path) -> str:
    path.write_text("precious")
    path.chmod(0o400)
    return str(path)


PLACES: dict[str, tuple[Callable[[Path], str], str]] = {
    "a folder": (lambda path: str(path.parent), "folder"),
    "no folder": (lambda path: str(path / "out.json"), "folder"),
    "below a file": (write_file, "folder"),
    "a long name": (lambda path: str(path / ("x" * 300)), "folder"),
    "too long a name": (lambda path: str(path.parent / ("x" * 300)), "File name too long"),
    "no place for files": (lambda path: "/proc/out.json", "written"),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("path", "param"), WRITTEN, ids=name)
def test_a_file_that_could_not_be_written_is_told_before_any_work(
    path: tuple[str, ...],
    param: object,
    place: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    make, said = PLACES[place]
    line = read_refusal(path, f"{param.opts[0]}={make(tmp_path / 'inner')}")  # type: ignore[attr-defined]
    assert mentions(line, f"error: {param.name}") and said in line  # type: ignore[attr-defined]
    left = [entry.read_text() for entry in tmp_path.iterdir()]
    assert left == (["precious"] if place == "below a file" else [])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everything")
def test_a_file_of_others_is_not_written(tmp_path: Path) -> None:
    assert "Permission denied" in read_refusal(("calibrate",), "-o", lock(tmp_path / "p.json"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("calibrate -o a.json --data a.json", "output a.json data"),
        ("calibrate -o a.json --report ./a.json", "output a.json report"),
        ("eval -o a.json --report link.json", "output a.json report"),
        ("eval --report a.json --text a.json", "report a.json text"),
        ("generate --batch a.json -o link.json", "output link.json batch"),
        ("generate --profile b.json --profile a.json -o a.json", "output a.json profile"),
        ("calibrate a.json -o a.json", "output a.json model"),
    ],
)
def test_no_file_is_written_over_another_one(
    given: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.json").write_text("precious")
    Path("link.json").symlink_to("a.json")
    result = CliRunner().invoke(app, given.split())
    assert result.exit_code == 2 and mentions(result.stderr, said)
    assert Path("a.json").read_text() == "precious"


@pytest.mark.parametrize(
    "given",
    [
        ["generate", "-p", "\udcff"],
        ["serve", "--api-key", "good", "--api-key", "b\udcff"],
        ["size", "\udcff"],
        ["serve", "--served-model-name", "\ud800"],
    ],
)
def test_bytes_that_are_no_text_are_refused(given: list[str]) -> None:
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 2 and mentions(result.stderr, "UTF-8"), result.exception


@pytest.mark.parametrize("given", ["", " "])
def test_a_server_needs_a_name_and_an_address(given: str) -> None:
    assert mentions(
        read_refusal(("serve",), "--served-model-name", given), "served_model_name empty"
    )
    assert mentions(read_refusal(("serve",), "--host", given), "host 0.0.0.0")


@pytest.mark.parametrize("given", ["a\nb", "a\r", "a\u2028b", "\x85"])
def test_the_name_of_a_model_is_one_line(given: str) -> None:
    assert mentions(
        read_refusal(("serve",), "--served-model-name", given), "served_model_name line"
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["generate", "--batch", "in.jsonl", "-o", "out"], "output out regular"),
        (["calibrate", "-o", "out"], "output out regular"),
        (["eval", "-o", "out", "--suites", "x"], "suites 'x'"),
        (["bench", "serving", "throughput", "./absent", "-o", "out"], "'./absent'"),
    ],
)
def test_a_pipe_is_written_to_but_not_read_or_replaced(
    given: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Figures may go to `-o >(jq .)`; a profile would take the place of the device that
    is named.
    """
    monkeypatch.chdir(tmp_path)
    os.mkfifo("out")
    Path("in.jsonl").touch()
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 2 and mentions(result.stderr, said) and Path("out").is_fifo()
