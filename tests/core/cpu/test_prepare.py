"""The steps that prepare a model: what is said of them, and that they replace what they change."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase
from typer.testing import CliRunner

from tangram.cli import app
from tangram.model import auto_classes, cpu_weights, prepare
from tangram.model.cpu_weights import FewRowsLinear
from tangram.model.load import LoadedModel
from tangram.model.prepare import STEPS, Stage, Wanted
from tests.core.cpu.test_purity import TINY_LATENT
from tests.core.cpu.test_quantized import SMALL
from tests.small_engines import small_engine, tiny_model

CPU = torch.device("cpu")


def explain(*options: str) -> dict[str, bool]:
    """The steps that `tangram serve --explain` lists, and whether they apply."""
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["serve", *options, "--explain"])
    assert result.exit_code == 0, result.output
    rows = [line.split("│")[1:3] for line in result.stdout.splitlines() if line.startswith("│")]
    return {name.strip(): applies.strip() == "yes" for name, applies in rows if name.strip()}


def test_serve_explains_the_steps_without_reading_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_classes.AutoModelForCausalLM, "from_pretrained", None)
    monkeypatch.setattr(prepare, "is_amd", lambda: True)
    found = explain("smollm2", "--device", "cpu", "--dtype", "float32")
    assert list(found) == [step.name for step in STEPS]
    assert [name for name, applies in found.items() if applies] == [
        *("detach", "infer", "hidden", "join", "few rows")
    ]
    rounded = explain("smollm2", "--device", "cpu", "--quantization", "int4", "--compile-decode")
    assert [name for name, applies in rounded.items() if applies] == [
        *("detach", "infer", "hidden", "round", "compile decode")
    ]


def test_steps_are_listed_in_the_order_in_which_they_run() -> None:
    stages = [step.stage for step in STEPS]
    assert stages == sorted(stages, key=list(Stage).index)
    assert len({step.name for step in STEPS}) == len(STEPS)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize("config", [SMALL, TINY_LATENT], ids=["heads", "latents"])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_modules_are_replaced_and_none_is_changed(
    config: PretrainedConfig,
    on_gpu: bool,
    tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    model = tiny_model(config, tokenizer, dtype=torch.bfloat16).model
    before = [(part, type(part)) for part in model.modules()]
    decodes = not on_gpu and config is SMALL
    wanted = Wanted(CPU, torch.bfloat16, graphs=on_gpu, compile_decode=decodes)
    prepare.prepare(model, wanted, Stage.SERVE)
    for part, kind in before:
        assert type(part) is kind and "forward" not in vars(part)
    after = list(model.modules())
    assert not any("forward" in vars(part) for part in after)
    if on_gpu or decodes:
        assert not {id(part) for part in after} & {
            id(part) for part, _ in before if hasattr(part, "input_layernorm")
        }
    prepare.prepare(model, wanted, Stage.SERVE)
    assert list(map(id, model.modules())) == list(map(id, after)), "the second time it is done"


@pytest.mark.parametrize("amd", [False, True])
def test_few_rows_are_multiplied_otherwise_on_processors_of_amd(
    amd: bool,
    adopt_tiny: Callable[[PretrainedConfig], LoadedModel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prepare, "is_amd", lambda: amd)
    monkeypatch.setattr(cpu_weights, "_LEAST_WEIGHTS", 1)
    loaded = adopt_tiny(SMALL)
    small_engine(loaded)
    assert any(type(part) is FewRowsLinear for part in loaded.model.modules()) == amd
