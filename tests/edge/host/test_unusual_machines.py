"""Commands started on unusual machines: no streams, no home, a full disk, odd names
of models.
"""

from __future__ import annotations

import pwd
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tangram.cli import app, terminal
from tangram.cli.checks import check_outputs
from tangram.compress.profile import Profile
from tangram.config import cache_folder
from tangram.errors import ConfigError, ModelError
from tangram.model.source import check_source, is_gguf
from tests.mentions import mentioning, mentions

SIZE = [sys.executable, "-m", "tangram", "size", "smollm2"]
NOBODY = "~there-is-no-such-user/model"


def shell(command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", command, "sh", *arguments],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_command_may_be_started_without_streams(closed: str) -> None:
    ended = shell(f'exec "$@" {closed}', *SIZE)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert (">&-" in closed.split()) == (not ended.stdout)


def test_the_first_file_opened_is_no_stream() -> None:
    """Else the log would be written into it."""
    asked = (
        "import os, sys; from tangram import __main__; __main__._open_streams(); "
        "print(os.open('/', 0) > 2)"
    )
    ended = shell(
        f'"$1" -c "{asked}; print(sys.stdin.read(), file=sys.stderr)" <&- 2>&-', sys.executable
    )
    assert (ended.returncode, ended.stdout) == (0, "True\n")


def test_a_ctrl_c_before_the_first_line_of_ours_has_no_time_to_come() -> None:
    """Of what the entry point imports before `main`: a Ctrl-C there ends in a traceback."""
    asked = "import sys, tangram.__main__; print({'numpy', 'pydantic', 'typer'} & {*sys.modules})"
    ended = shell(f'"$1" -c "{asked}"', sys.executable)
    assert (ended.returncode, ended.stdout) == (0, "set()\n")


def test_a_prompt_that_nobody_can_type_is_one_line() -> None:
    ended = shell('exec "$@" <&-', sys.executable, "-m", "tangram", "generate")
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert mentions(ended.stderr, "prompt empty")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
@pytest.mark.parametrize(
    "arguments", [["size", "smollm2"], ["size", "smollm2", "--json"], ["--help"]]
)
def test_output_without_space_is_one_line(arguments: list[str]) -> None:
    ended = shell('exec "$@" >/dev/full', *SIZE[:3], *arguments)
    assert ended.returncode == 1
    assert mentions(ended.stderr, "error: output space") and ended.stderr.count("\n") == 1


def test_a_pipe_without_end_is_not_read_to_its_end() -> None:
    ended = shell('exec "$@" </dev/zero', sys.executable, "-m", "tangram", "generate")
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert mentions(ended.stderr, "prompt")


def test_a_line_without_end_is_not_read_to_its_end() -> None:
    read = "from tangram.cli.terminal import read_typed_line; read_typed_line('')"
    ended = shell(f'exec "$1" -c "{read}" </dev/zero', sys.executable)
    assert mentions(ended.stderr, "OSError line")


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user whom the machine does not know, as containers have them."""

    def unknown(user: int) -> None:
        raise KeyError(user)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME", "TANGRAM_CACHE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("homeless")
def test_without_a_home_a_cache_folder_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=mentioning("TANGRAM_CACHE")):
        cache_folder()
    monkeypatch.setenv("HOME", "relative")
    with pytest.raises(ConfigError, match=mentioning("'relative/.cache' TANGRAM_CACHE")):
        cache_folder()
    monkeypatch.setenv("TANGRAM_CACHE", "/kept")
    assert cache_folder() == Path("/kept")


@pytest.mark.usefixtures("homeless")
def test_without_a_home_chat_has_no_history(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    with terminal.history():
        pass
    assert not list(tmp_path.iterdir())


def test_a_tilde_in_the_name_of_the_cache_is_the_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Docker and systemd hand it on as it is."""
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("TANGRAM_CACHE", "~/kept")
    assert cache_folder() == Path("/home/me/kept")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "model '' smollm2"),
        (" ", "model smollm2"),
        (NOBODY, f"'{NOBODY}' folder"),
        (f"{NOBODY}.gguf", f"'{NOBODY}.gguf' GGUF"),
        ("loop", "'./loop' folder"),
        ("model.safetensors", "'model.safetensors' folder GGUF"),
        ("model.GGUF", None),
    ],
)
def test_a_model_that_is_none_is_told_before_any_work(
    name: str, words: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for file in ("model.safetensors", "model.GGUF"):
        Path(file).touch()
    Path("loop").symlink_to("loop")
    if words is None:
        check_source(name)
        assert is_gguf(name)
    elif name != "loop":
        with pytest.raises(ModelError, match=mentioning(words)):
            check_source(name)
    else:
        with pytest.raises(ModelError, match=mentioning(words)):
            check_source(f"./{name}")


@pytest.mark.parametrize(
    "given",
    [
        ["size", NOBODY],
        ["generate", NOBODY, "-p", "a"],
        ["size", "a" * 300],
        ["generate", "a" * 300, "-p", "a"],
    ],
)
def test_a_path_that_leads_nowhere_is_one_line(
    given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    result = CliRunner().invoke(app, given, env={"COLUMNS": None})
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.exception
    assert [path.name for path in tmp_path.iterdir()] == ["loop"]


def test_a_current_folder_that_is_gone_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    result = CliRunner().invoke(app, ["generate", "-p", "a"], env={"COLUMNS": None})
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.exception
    assert mentions(result.stderr, "folder")


@pytest.mark.parametrize("name", [NOBODY, "loop"])
def test_a_file_to_read_may_lie_nowhere(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it is the one to write is asked of any path."""
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    check_outputs({"output": Path("out.json"), "data": Path(name)})


def test_profiles_of_near_retentions_do_not_overwrite_each_other() -> None:
    near = Profile.model_construct(
        model=type("Model", (), {"name": "a/B"}),
        scorer=type("Scorer", (), {"name": "keydiff"}),
        scope="model",
        chunk_tokens=64,
    )
    names = {
        near.model_copy(update={"kv_retention": ratio}).file_name
        for ratio in (0.5, 0.5000001, 0.9999999)
    }
    assert "b.keydiff.model.c64.r0.5.json" in names and len(names) == 3
