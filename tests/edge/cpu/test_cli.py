"""The `tangram` command."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from tangram.cli import app
from tangram.compress.profile import Profile
from tangram.config import EngineConfig
from tangram.errors import ConfigError
from tangram.model.source import name_served_model
from tests.core.cpu.test_real_model import TEXT
from tests.mentions import mentions

CLI = CliRunner()


def test_size_prints_the_exact_size_of_a_preset() -> None:
    result = CLI.invoke(app, ["size", "llama-3.1-8b", "--context", "32000", "--memory-gib", "80"])
    assert result.exit_code == 0
    assert "3.91 GiB" in result.output


def test_errors_are_one_line_and_exit_code_2() -> None:
    result = CLI.invoke(app, ["generate", "--prompt", "hello", "--kv-retention", "1.5"])
    assert result.exit_code == 2
    assert "kv_retention is 1.5" in result.output
    assert "Traceback" not in result.output


def test_a_text_that_could_never_fit_is_not_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = SimpleNamespace(
        longest_token_bytes=4, encode=lambda text: pytest.fail("it is tokenized")
    )
    engine = SimpleNamespace(max_model_len=8, codec=codec)
    monkeypatch.setattr("tangram.engine.setup.build.build_engine", lambda config: engine)
    result = CLI.invoke(app, ["generate", "-p", "é" * 17])
    assert result.exit_code == 2
    assert mentions(result.output, "prompt 34 8 max_model_len 32")


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("smollm2", "smollm2"),
        ("Qwen/Qwen3-0.6B", "Qwen3-0.6B"),
        ("Qwen/Qwen3-4B", "Qwen/Qwen3-4B"),
        ("Qwen/Qwen3-0.6B/", "Qwen3-0.6B"),
        ("Qwen/Qwen3-0.6B/../qwen3.q8.gguf", "qwen3.q8"),
        ("~/link", "link"),
        (".", "home"),
        ("Qwen/..", "home"),
    ],
)
def test_a_model_that_lies_here_is_served_under_its_last_name(
    model: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name on the Hub stays whole, unless a folder here is called like that."""
    home = tmp_path / "home"
    folder = home / "Qwen" / "Qwen3-0.6B"
    folder.mkdir(parents=True)
    (home / "Qwen" / "qwen3.q8.gguf").touch()
    (home / "link").symlink_to(folder)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home)
    assert name_served_model(model) == name


@pytest.mark.parametrize(
    "option",
    [
        "--max-num-seqs=4",
        "--max-num-batched-tokens=8192",
        "--kv-cache-gib=1",
        "--prompt-patience=4",
        "--profile=a.json",
    ],
)
def test_calibrate_does_not_know_what_only_an_engine_needs(
    option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tangram.model.load.load_model", None)
    refused = CLI.invoke(app, ["calibrate", "smollm2", "-o", "profile.json", option])
    assert refused.exit_code == 2
    assert mentions(refused.output, option.split("=")[0])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--samples", "50", "--data", "a.txt"], "calibration_samples 50 data 'a.txt'"),
        (["--seed", "3", "--data", "a.txt"], "seed 3 --data"),
        (["--import", "budgets.npz", "--samples", "50"], "calibration_samples 50 --import"),
        (["--import", "budgets.npz", "--data", "a.txt"], "data a.txt --import"),
        (["--import", "budgets.npz", "--device", "cpu"], "device cpu --import"),
        (["--import", "budgets.npz", "--dtype", "float32"], "dtype float32 --import"),
        (["--import", "budgets.npz", "--load-format", "dummy"], "load_format dummy --import"),
        (["--import", "budgets.npz", "--seed", "3"], "seed 3 --import"),
    ],
)
def test_what_a_calibration_would_not_look_at_is_refused(
    options: list[str], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tangram.model.load.load_model", None)
    refused = CLI.invoke(app, ["calibrate", "smollm2", "-o", "profile.json", *options])
    assert refused.exit_code == 2
    assert mentions(refused.output, named)


@pytest.mark.parametrize(
    ("chunk_tokens", "options", "texts"), [(2048, [], 50), (4096, ["--samples", "3"], 3)]
)
def test_chunks_that_fill_a_step_are_calibrated(
    chunk_tokens: int, options: list[str], texts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine's step must hold a chunk and a token of each sequence beside it; a calibration has
    no such steps.
    """

    def read_told(*given: object, texts: list[str], **_: object) -> list[Profile]:
        (config,) = (entry for entry in given if isinstance(entry, EngineConfig))
        raise ConfigError(f"{len(texts)} texts, {config.chunk_tokens} tokens a chunk")

    model = SimpleNamespace(fingerprint=None, geometry=SimpleNamespace(max_positions=8192))
    monkeypatch.setattr("tangram.model.load.load_model", lambda *_, **__: model)
    monkeypatch.setattr("tangram.engine.setup.profiles.calibrate_model", read_told)
    command = [
        "calibrate",
        "smollm2",
        "-o",
        "profile.json",
        "--chunk-tokens",
        str(chunk_tokens),
        *options,
    ]
    assert f"{texts} texts, {chunk_tokens} tokens a chunk" in CLI.invoke(app, command).output


def test_calibrate_writes_a_profile_that_generate_accepts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["/usr/bin/tangram", "calibrate", "smollm2"])
    data, profile = tmp_path / "texts.jsonl", tmp_path / "profile.json"
    texts = [{"text": TEXT[start : start + 1500]} for start in (0, 5000)]
    data.write_text("\n".join(map(json.dumps, texts)))
    options = [
        "--chunk-tokens",
        "128",
        "--kv-retention",
        "0.6",
        "--scope",
        "layer",
        "--scorer",
        "tova",
    ]
    report = tmp_path / "report.json"
    shown = ["--report", str(report), "--also-at", "0.4"]
    made = CLI.invoke(
        app, ["calibrate", "smollm2", "-o", str(profile), "--data", str(data), *options, *shown]
    )
    assert made.exit_code == 0, made.output
    assert Profile.load(profile).calibration.samples == 2
    said = made.output.splitlines()
    assert (
        "The rank correlation of heads between texts is " in " ".join(said)
        and said[-2] == "Serve with it:"
    )
    line = shlex.split(said[-1])
    assert line[:3] == ["tangram", "serve", "smollm2"]
    served = CLI.invoke(app, ["generate", "-p", "Hello", "--max-tokens", "3", *line[3:]])
    assert served.exit_code == 0, served.output
    found = json.loads(report.read_text())
    assert list(found["retentions"]) == ["0.6", "0.4"] and found["kinds"] == {"texts": 2}
    assert found["environment"]["commit"] and found["command"] == "tangram calibrate smollm2"
    unnamed = options[:-2]  # the profile says its scorer
    used = CLI.invoke(
        app, ["generate", "-p", "Hello", "--max-tokens", "3", "--profile", str(profile), *unnamed]
    )
    assert used.exit_code == 0, used.output
    options[options.index("tova")] = "keydiff"
    refused = CLI.invoke(app, ["generate", "-p", "Hello", "--profile", str(profile), *options])
    assert refused.exit_code == 2
    assert "tova" in refused.output
