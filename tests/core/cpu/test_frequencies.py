"""A rotation that depends on the longest sequence is chosen once an engine, by max_model_len."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from typer.testing import CliRunner

from tangram.cli import app
from tangram.config import EngineConfig
from tangram.engine.loop import Engine
from tangram.engine.setup.option_checks import check_options
from tangram.errors import ConfigError, ModelError
from tangram.model.load import LoadedModel, load_configured, load_model
from tangram.types import SamplingParams
from tests.families import TOKENS, continuations, spread_weights
from tests.mentions import mentioning, mentions
from tests.small_engines import profile_file, run, small_engine
from tests.tiny_configs import VOCABULARY, tiny_config

GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
ORIGINAL = 128  # positions of the short factors, of 512
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.5],
    "long_factor": [2.0, 3.0, 5.0, 8.0],
    "original_max_position_embeddings": ORIGINAL,
}
MSCALES = {"short_mscale": 1.1, "long_mscale": 1.3}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
CHANGES: dict[str, dict[str, Any]] = {
    "phi3": {
        "rope_parameters": LONGROPE,
        "original_max_position_embeddings": ORIGINAL,
        "sliding_window": None,
    },
    "phimoe": {"rope_parameters": LONGROPE | MSCALES, "sliding_window": None},
    "llama": {"rope_parameters": DYNAMIC},
}


def save(model_type: str, folder: Path) -> str:
    tiny_config(model_type, **CHANGES[model_type]).save_pretrained(folder)
    return str(folder)


def load(model_type: str, folder: Path, max_model_len: int | None) -> LoadedModel:
    config = EngineConfig(
        save(model_type, folder),
        load_format="dummy",
        dtype="float32",
        device="cpu",
        max_model_len=max_model_len,
    )
    loaded = load_configured(config)
    spread_weights(loaded.model)
    return loaded


def of_transformers(loaded: LoadedModel, folder: Path) -> PreTrainedModel:
    """The same weights, with the config that Transformers reads."""
    config = AutoConfig.from_pretrained(folder)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.model.state_dict())
    return model.train(False)


def prompts(*lengths: int) -> list[list[int]]:
    """Of so many tokens."""
    return [[(7 * at + n) % (VOCABULARY - 6) + 3 for at in range(n)] for n in lengths]


@pytest.mark.parametrize(
    ("model_type", "max_model_len", "lengths"),
    [
        ("phi3", ORIGINAL, [3, 20, ORIGINAL - TOKENS]),
        ("phi3", None, [ORIGINAL + 1, 200, 400]),
        ("phimoe", ORIGINAL, [3, 20, ORIGINAL - TOKENS]),
        ("llama", None, [3, 130, 512 - TOKENS]),
    ],
)
def test_answers_are_those_of_transformers_on_the_side_that_is_chosen(
    model_type: str, max_model_len: int | None, lengths: list[int], tmp_path: Path
) -> None:
    loaded = load(model_type, tmp_path, max_model_len)
    asked = prompts(*lengths)
    expected, lead = continuations(of_transformers(loaded, tmp_path), asked)
    assert lead > 1e-4, "a near-tie decides nothing: choose another seed"
    engine = small_engine(loaded, max_model_len=max_model_len)
    assert run(engine, asked, GREEDY) == expected


@pytest.mark.parametrize(("model_type", "max_model_len"), [("phi3", None), ("llama", 1000)])
@pytest.mark.parametrize("options", [{}, {"kv_retention": 0.5, "scorer": "expected_attention"}])
def test_a_request_gets_the_same_answer_beside_longer_ones(
    model_type: str, max_model_len: int | None, options: dict[str, Any], tmp_path: Path
) -> None:
    loaded = load(model_type, tmp_path, max_model_len)
    if options:
        options["profile"] = (profile_file(loaded, tmp_path, scorer="expected_attention"),)
    asked = prompts(3, 70, ORIGINAL - 4, 200, 490)

    def engine() -> Engine:
        return small_engine(loaded, max_model_len=max_model_len, **options)

    assert run(engine(), asked, GREEDY) == [run(engine(), [each], GREEDY)[0] for each in asked]


@pytest.mark.parametrize("model_type", ["phi3", "llama"])
def test_a_pass_writes_no_frequencies_and_the_host_reads_no_position(
    model_type: str, tmp_path: Path
) -> None:
    """A tensor on the device meta has no values that the host could read."""
    rotary = load(model_type, tmp_path, None).model.model.rotary_emb.to("meta")
    before = {name: (id(buffer), buffer._version) for name, buffer in rotary.named_buffers()}
    rotary(torch.empty(0, device="meta"), torch.zeros(1, 3, dtype=torch.int64, device="meta"))
    after = {name: (id(buffer), buffer._version) for name, buffer in rotary.named_buffers()}
    assert after == before


def test_a_dynamic_base_is_that_of_the_longest_sequence(tmp_path: Path) -> None:
    loaded = load("llama", tmp_path, 1000)
    assert loaded.geometry.max_positions == 1000
    theirs = of_transformers(loaded, tmp_path)
    places = torch.tensor([[0, 1, 400, 999]])  # Transformers stretches by the last one
    for ours, expected in zip(
        *(model.model.rotary_emb(torch.empty(0), places) for model in (loaded.model, theirs)),
        strict=True,
    ):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("model_type", "choices"),
    [
        ("phi3", [[1, ORIGINAL], [ORIGINAL + 1, 512, None]]),
        ("phimoe", [[ORIGINAL], [ORIGINAL + 1]]),
        ("llama", [[1, 512, None], [513], [1024]]),
    ],
)
def test_entries_of_another_choice_have_another_digest(
    model_type: str, choices: list[list[int | None]], tmp_path: Path
) -> None:
    digests = [
        {load(model_type, tmp_path, limit).weights_digest for limit in alike} for alike in choices
    ]
    assert all(len(alike) == 1 for alike in digests)
    assert len(set.union(*digests)) == len(choices)


@pytest.mark.parametrize(
    ("model_type", "given", "facts"),
    [
        ("phi3", ["--max-model-len", "100"], "longrope short 100 128"),
        ("phi3", [], "longrope long 512 128"),
        ("llama", ["--max-model-len", "1024"], "dynamic 43267.5 1024 512"),
    ],
)
def test_the_log_and_explain_tell_the_choice(
    model_type: str, given: list[str], facts: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    command = ["serve", save(model_type, tmp_path), "--explain", "--load-format", "dummy", *given]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert any(mentions(line, facts) for line in result.stderr.splitlines()), result.stderr
    with caplog.at_level(logging.INFO):
        load(model_type, tmp_path, int(given[1]) if given else None)
    assert any(mentions(line, facts) for line in caplog.messages)


def test_a_dynamic_rotation_stretches_by_its_factor_at_most(tmp_path: Path) -> None:
    folder = save("llama", tmp_path)
    config = EngineConfig(model=folder, device="cpu", load_format="dummy", max_model_len=1024)
    assert check_options(config).type == "cpu"
    with pytest.raises(ConfigError, match=mentioning("max_model_len 1025 1024")):
        check_options(replace(config, max_model_len=1025))


@pytest.mark.parametrize(
    ("parameters", "field", "value"),
    [
        (DYNAMIC, "factor", "two"),
        (DYNAMIC, "factor", 0.5),
        (LONGROPE, "original_max_position_embeddings", None),
    ],
)
def test_a_number_that_decides_and_is_none_is_named(
    parameters: dict[str, Any], field: str, value: object, tmp_path: Path
) -> None:
    path = Path(save("llama", tmp_path)) / "config.json"
    content = json.loads(path.read_text())
    content["rope_parameters"] = parameters | {field: value}
    path.write_text(json.dumps(content))
    with pytest.raises(ModelError, match=mentioning(f"llama rope_parameters.{field} {value} 1")):
        load_model(str(tmp_path), load_format="dummy", device="cpu")
