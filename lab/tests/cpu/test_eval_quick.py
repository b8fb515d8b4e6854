"""`tangram eval --quick`: what is served, beside everything kept, in minutes and in words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from transformers import LlamaConfig, PreTrainedTokenizerBase
from typer.testing import CliRunner

from tangram.cli import app
from tangram.compress.library import find_shipped_profiles
from tangram.compress.profile import Profile
from tangram.config import EngineConfig
from tangram.engine.llm import LLM
from tangram.errors import ConfigError
from tangram_lab.accuracy.engines import ModelBench
from tangram_lab.accuracy.results import Results
from tangram_lab.accuracy.run import PlannedCell
from tangram_lab.cli.evaluate import Bar

CLI = CliRunner()


@pytest.fixture
def model(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    LlamaConfig(
        vocab_size=49152,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_it_asks_what_a_server_of_the_model_would_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The gate's scorer for the embedded model, with the profiles that ship; nothing is calibrated
    for it.
    """
    seen: list[PlannedCell] = []

    def before(bench: ModelBench, plans: Sequence[PlannedCell]) -> float:
        seen.extend(plans)
        raise ConfigError("seen")

    monkeypatch.setattr("tangram_lab.accuracy.grid_duration.minutes", before)
    assert "seen" in CLI.invoke(app, ["eval", "--quick", "-o", str(tmp_path / "r.json")]).output
    static = [plan for plan in seen if plan.method.name == "static"]
    assert {plan.method.scorer for plan in static} == {"fastkvzip"}
    for plan in static:
        name = f"smollm2.fastkvzip.model.c512.r{plan.method.kv_retention:g}.json"
        assert plan.basis["profile"] == Profile.load(find_shipped_profiles() / name).fingerprint()
    assert [plan.questions for plan in seen] == [9, 3] * 3


class WorkCounter(Bar):
    """A bar that remembers the work."""

    total = done = 0

    def expect(self, tokens: int) -> None:
        type(self).total = tokens
        super().expect(tokens)

    def advance(self, tokens: int) -> None:
        type(self).done += tokens
        super().advance(tokens)


def test_what_is_left_goes_by_the_work_that_was_done(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    bar = Bar(lambda: now[0])
    bar.expect(100)
    bar.turns_to("loading")
    now[0] = 60.0
    bar.advance(25)
    bar.turns_to("reading")
    assert capsys.readouterr().err.splitlines() == ["loading", "reading (about 3.0 minutes left)"]


def test_it_says_how_long_beforehand_and_what_it_costs_at_the_end(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TANGRAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("tangram_lab.cli.evaluate.Bar", WorkCounter)
    kept = tmp_path / "r.json"
    options = ["--load-format", "dummy", "--kv-cache-gib", "0.1"]
    command = ["eval", str(model), "--quick", "--kv-retention", "0.5", *options, "-o", str(kept)]
    result = CLI.invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    begin, end = (
        said.index("as served at ρ 0.5."),
        said.rindex("ρ 0.5 (static, keydiff) leaves the likeliest next"),
    )
    first = said.index("everything kept: answering questions about long texts (ruler)")
    assert begin < said.index("minutes to go at the speed of one chunk") < first < end
    # What is left is told from the second part on.
    assert len(re.findall(r"\(about [\d.]+ minutes left\)", said)) == 3 + 1
    assert "ρ 0.5: reading real text (about" in said and "scope model:" not in said
    assert WorkCounter.done == WorkCounter.total > 0
    assert said.count("(static, keydiff)") == 2
    cells = Results.load(kept).cells
    assert [cell.method.name for cell in cells] == ["full", "full", "static", "static"]
    # What it had to calibrate is what a first start would have, and is kept for it.
    (profile,) = (tmp_path / "cache").glob("weights/*/profiles/*")
    assert cells[-1].basis["profile"] == Profile.load(profile).fingerprint()
    monkeypatch.setattr("tangram.engine.setup.profiles.calibrate_model", None)
    LLM(str(model), load_format="dummy", kv_cache_gib=0.1, kv_retention=EngineConfig.kv_retention)


@pytest.mark.parametrize(
    "given", [["--samples", "9"], ["--methods", "full"], ["--no-align"], ["--scopes", "layer"]]
)
def test_what_it_settles_is_refused_beside_it(
    given: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tangram_lab.accuracy.evaluation.load_checked", None)
    result = CLI.invoke(app, ["eval", "--quick", *given])
    assert result.exit_code == 2 and "but --quick fixes it" in " ".join(result.output.split())
