"""Every causal language model of Transformers is served with its tokens, or refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase
from typer.testing import CliRunner

from tangram.cli import app
from tests.families import SERVED, Family, families, judge, read_verdicts, save_tiny
from tests.tiny_configs import tiny_config

VERDICTS = read_verdicts()


def test_the_page_has_every_model_type() -> None:
    assert sorted(VERDICTS) == sorted(map(str, families())), "run python -m tests.families"


@pytest.mark.parametrize("family", families(), ids=str)
def test_a_model_type_does_what_the_page_says(family: Family, tmp_path: Path) -> None:
    save_tiny(family, tmp_path)
    verdict = judge(tmp_path)
    assert verdict == VERDICTS.get(str(family)), "run python -m tests.families"
    if verdict != SERVED:
        refused = CliRunner().invoke(
            app, ["generate", str(tmp_path), "--prompt", "x", "--load-format", "dummy"]
        )
        assert refused.exit_code == 2
        *advice, line = refused.output.splitlines()  # Transformers may say something of a config
        assert "Traceback" not in refused.output and "is_decoder" not in "".join(advice)
        assert line.startswith(f"error: {family.model_type}") and line.endswith(verdict)


@pytest.mark.parametrize("model_type", ["doge", "git", "gptj", "stablelm"])
def test_a_saved_model_is_refused_in_one_line(
    model_type: str, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(model_type))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    refused = CliRunner().invoke(app, ["generate", str(tmp_path), "--prompt", "x"])
    assert refused.exit_code == 2
    (line,) = refused.output.splitlines()  # without progress bars: the output is no terminal
    assert line.startswith(f"error: {model_type}") and line.endswith(VERDICTS[model_type])
