"""What is wrong with every model is said before the weights are loaded, which may take minutes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tangram.cli import app
from tangram.compress.profile import Profile
from tangram.engine.setup import option_checks
from tests.mentions import mentions

SHIPPED = (
    Path(__file__).parents[3] / "tangram" / "profiles" / "smollm2.keydiff.model.c512.r0.5.json"
)


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("the weights were loaded")

    monkeypatch.setattr(option_checks, "load_configured", fail)


def of_version_99(folder: Path) -> str:
    content = json.loads(SHIPPED.read_text()) | {"format_version": 99}
    path = folder / "profile.json"
    path.write_text(json.dumps(content))
    return str(path)


def another(folder: Path) -> str:
    """A profile of the same scorer and another scope."""
    profile = Profile.load(SHIPPED)
    path = folder / "layer.json"
    profile.model_copy(update={"scope": "layer"}).save(path)
    return str(path)


WRONG: dict[str, tuple[list[str | Callable[[Path], str]], str]] = {
    "scorer": (["--scorer", "h2o"], "scorer is 'h2o', it must be one of"),
    "scorer without gate": (["--scorer", "keydiff", "--gate", "FILE"], "scorer keydiff takes none"),
    "no gate": (["--gate", "FILE"], "cannot be read as a Fast KVzip gate"),
    "gate that is missing": (["--gate", "NONE"], "there is no such file"),
    "chunk of the scorer": (["--scorer", "snapkv", "--chunk-tokens", "16"], "chunk_tokens is 16"),
    "profile that is none": (["--profile", "FILE"], "profile"),
    "profile that is missing": (["--profile", "NONE"], "cannot be read"),
    "profile of tomorrow": (["--profile", of_version_99], "format_version is 99"),
    "profile of a scorer": (
        ["--profile", str(SHIPPED), "--scorer", "snapkv"],
        "scorer is 'keydiff'",
    ),
    "profile of a chunk": (["--profile", str(SHIPPED), "--chunk-tokens", "256"], "chunk_tokens is"),
    "profile of a scope": (["--profile", str(SHIPPED), "--scope", "layer"], "scope is 'model'"),
    "profiles of scopes": (
        ["--profile", str(SHIPPED), "--profile", another],
        "are for several scopes",
    ),
    "device": (["--device", "tpu"], "device is 'tpu'"),
    "cache": (["--kv-cache-gib", "1000000"], "this machine allows the process"),
    "length": (["--max-model-len", "100000"], "the model was made for at most 8192 positions"),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(("given", "words"), WRONG.values(), ids=list(WRONG))
@pytest.mark.parametrize("command", [["generate", "-p", "a"], ["serve", "--port", "0"]])
def test_options_that_fit_no_model(
    command: list[str], given: list[str | Callable[[Path], str]], words: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("{}")
    places = {"FILE": str(tmp_path / "file"), "NONE": str(tmp_path / "none")}
    options = [places.get(one, one) if isinstance(one, str) else one(tmp_path) for one in given]
    result = CliRunner().invoke(app, [command[0], "smollm2", *command[1:], *options])
    assert result.exit_code == 2, result.exception
    assert words in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    "command",
    [
        ["calibrate", "smollm2", "-o", "OUT", "--scorer", "h2o"],
        ["eval", "smollm2", "--scorers", "h2o"],
        ["bench", "serving", "throughput", "smollm2", "--scorer", "h2o"],
        ["bench", "serving", "ablation", "smollm2", "--scorer", "h2o"],
        ["chat", "smollm2", "--scorer", "h2o"],
    ],
)
def test_every_command_checks_its_scorer_first(command: list[str], tmp_path: Path) -> None:
    given = [one.replace("OUT", str(tmp_path / "out")) for one in command]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 2, result.exception
    assert mentions(result.stderr, "scorer 'h2o' keydiff")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("bench serving throughput smollm2 --input-tokens 9000", "input_tokens 9128 8192"),
        ("bench serving multi-turn smollm2 --history-tokens 9000", "history_tokens 9768 8192"),
        ("bench serving ablation smollm2 --input-tokens 9000", "input_tokens 9128 8192"),
        ("bench serving ablation smollm2 --rungs best", "rungs 'best' full-kv"),
        ("bench serving trace smollm2 --file NONE", "trace NONE"),
        ("bench naive smollm2 --tokens 9000", "prompt_tokens tokens 9001 8192"),
        ("calibrate smollm2 -o OUT --chunk-tokens 16384", "chunk_tokens 16384 8192"),
        (
            "calibrate smollm2 --train-gate OUT.safetensors --chunk-tokens 16384",
            "chunk_tokens 16384 8192",
        ),
        ("eval smollm2 --suites ruler --context-tokens 16384", "context_tokens 16384 8192"),
    ],
)
def test_lengths_are_checked_by_the_config(command: str, words: str, tmp_path: Path) -> None:
    given = [one.replace("OUT", str(tmp_path / "out")) for one in command.split()]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 2, result.exception
    assert mentions(result.stderr, words)


def test_the_text_stands_after_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        "tangram.cli.generate._complete", lambda config, text, sampling: asked.append(text)
    )
    for given in (["smollm2", "Hi"], ["smollm2", "-p", "Hi"], ["smollm2", "-"], ["smollm2"]):
        assert CliRunner().invoke(app, ["generate", *given], input="Hi\n").exit_code == 0
    assert asked == ["Hi"] * 4
    twice = CliRunner().invoke(app, ["generate", "smollm2", "Hi", "-p", "Ho"])
    assert twice.exit_code == 2 and mentions(twice.stderr, "text 'Hi' prompt 'Ho'")
