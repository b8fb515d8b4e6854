"""Code that a model's folder names is never run, whatever stands on standard input."""

from __future__ import annotations

import ast
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

from tangram.cli import app
from tangram.engine.llm import LLM
from tangram.errors import ModelError
from tangram.model.load import load_model
from tests.edge.cpu.test_model_files import save_llama, write_llama
from tests.mentions import mentioning, mentions

ROOT = Path(__file__).parents[3]
AGREEING = "y\n1\nyes\nY\n" * 1000
# Names each auto class that Transformers could look for code of.
AUTO_MAP = {
    "AutoConfig": "owned.OwnedConfig",
    "AutoModelForCausalLM": "owned.OwnedModel",
    "AutoTokenizer": ["owned.OwnedTokenizer", "owned.OwnedTokenizer"],
    "AutoProcessor": "owned.OwnedProcessor",
}
CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
Path({marker!r}).touch()
class OwnedConfig(LlamaConfig):
    model_type = "owned"
class OwnedModel(LlamaForCausalLM):
    config_class = OwnedConfig
class OwnedTokenizer(PreTrainedTokenizerFast):
    pass
def generate(model, **options):
    return model
"""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with its tokenizer."""
    return save_llama(tmp_path_factory.mktemp("plain"), positions=2048)


@pytest.fixture
def folder(plain: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of it with code beside. The test fails if the code has run."""
    marker = tmp_path / "it has run"
    copy = Path(shutil.copytree(plain, tmp_path / "model"))
    (copy / "custom_generate").mkdir()
    for name in ("owned.py", "custom_generate/generate.py"):
        (copy / name).write_text(CODE.format(marker=str(marker)))
    yield copy
    assert not marker.exists()


def change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def config_names_code(folder: Path) -> None:
    change(folder / "config.json", model_type="owned", auto_map=AUTO_MAP)


def tokenizer_names_code(folder: Path) -> None:
    """Of a class and, by its config, of a model that Transformers has no tokenizer for."""
    change(folder / "config.json", model_type="seed_oss")
    change(folder / "tokenizer_config.json", tokenizer_class="OwnedTokenizer", auto_map=AUTO_MAP)


def model_names_code(folder: Path) -> None:
    """Transformers knows the config, and no language model of it."""
    change(folder / "config.json", model_type="siglip", auto_map=AUTO_MAP)


def run(command: list[str]) -> tuple[int, str]:
    result = CliRunner().invoke(app, command, input=AGREEING, env={"COLUMNS": None})
    return result.exit_code, result.stderr


COMMANDS: dict[str, list[str]] = {
    "generate": ["generate", "FOLDER", "-p", "w1"],
    "pipe": ["generate", "FOLDER"],
    "batch": ["generate", "FOLDER", "--batch", "IN", "-o", "OUT"],
    "chat": ["chat", "FOLDER"],
    "serve": ["serve", "FOLDER", "--port", "0"],
    "calibrate": ["calibrate", "FOLDER", "-o", "OUT"],
    "gate": ["calibrate", "FOLDER", "--train-gate", "OUT.safetensors"],
    "eval": ["eval", "FOLDER", "--quick"],
    "naive": ["bench", "naive", "FOLDER"],
    "throughput": ["bench", "serving", "throughput", "FOLDER"],
    "ablation": ["bench", "serving", "ablation", "FOLDER"],
    "dummy": ["generate", "FOLDER", "-p", "w1", "--load-format", "dummy"],
    "draft": [
        *("generate", "PLAIN", "-p", "w1", "--kv-retention", "1", "--speculative-config"),
        '{"method": "draft_model", "model": "FOLDER"}',
    ],
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=list(COMMANDS))
def test_no_command_runs_code_of_a_folder(
    command: list[str], folder: Path, plain: Path, tmp_path: Path
) -> None:
    config_names_code(folder)
    request = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}
    (tmp_path / "in.jsonl").write_text(json.dumps(request) + "\n")
    places = {"FOLDER": folder, "PLAIN": plain, "IN": tmp_path / "in.jsonl", "OUT": tmp_path / "o"}
    given = command
    for name, path in places.items():
        given = [part.replace(name, str(path)) for part in given]
    code, said = run(given)
    last = said.rstrip("\n").split("\n")[-1]
    assert code == 2 and mentions(last, f"error: model {folder} auto_map")
    assert "trust_remote_code" not in said


def test_size_reads_the_config_alone(folder: Path) -> None:
    config_names_code(folder)
    assert run(["size", str(folder)])[0] == 0


@pytest.mark.parametrize("name_code", [config_names_code, tokenizer_names_code, model_names_code])
def test_code_of_any_part_is_refused(name_code: Callable[[Path], None], folder: Path) -> None:
    name_code(folder)
    code, said = run(["generate", str(folder), "-p", "w1"])
    assert code == 2 and mentions(said, f"{folder} auto_map") and "trust_remote_code" not in said


def test_code_of_a_model_on_the_hub_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    config_names_code(folder)
    model = tmp_path / "models--somebody--tiny"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("0" * 40)
    shutil.copytree(folder, model / "snapshots" / ("0" * 40))
    code, said = run(["generate", "somebody/tiny", "-p", "w1"])
    assert code == 2 and "model 'somebody/tiny': its auto_map names code" in said


def test_a_model_that_transformers_knows_is_served_without_its_code(
    folder: Path, plain: Path
) -> None:
    """Many published checkpoints have code for older versions beside them."""
    expected = load_model(str(plain)).weights_digest
    for name in ("config.json", "tokenizer_config.json"):
        change(folder / name, auto_map=AUTO_MAP, attn_implementation="somebody/kernels")
    change(folder / "generation_config.json", custom_generate=str(folder))
    loaded = load_model(str(folder))
    assert (type(loaded.model), loaded.weights_digest) == (LlamaForCausalLM, expected)
    assert type(loaded.tokenizer).__module__.startswith("transformers.")
    llm = LLM(str(folder), kv_cache_gib=0.01, kv_retention=1.0)
    assert llm.generate("w1 w2")


def test_files_beside_a_gguf_file_are_not_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANGRAM_CACHE", str(tmp_path / "cache"))
    config_names_code(folder)
    change(folder / "tokenizer_config.json", tokenizer_class="OwnedTokenizer", auto_map=AUTO_MAP)
    loaded = load_model(str(write_llama(folder / "beside.gguf")))
    assert loaded.geometry.vocab_size == 260 and "w1" not in loaded.tokenizer.get_vocab()


def test_one_module_calls_the_auto_classes() -> None:
    """A call anywhere else could ask on standard input."""
    callers = set()
    for path in (ROOT / "tangram").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformers"):
                callers |= {path.stem for name in node.names if name.name.startswith("Auto")}
    assert callers == {"auto_classes"}


def test_no_benchmark_is_asked_on_standard_input() -> None:
    silent = set()
    for path in (ROOT / "bench").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = node.func.value
                named = isinstance(owner, ast.Name) and owner.id.startswith("Auto")
                if named and "trust_remote_code" not in [entry.arg for entry in node.keywords]:
                    silent.add(f"{path.name}:{node.lineno}")
    assert silent == set()


def test_it_says_so_to_python_too(folder: Path) -> None:
    config_names_code(folder)
    with pytest.raises(ModelError, match=mentioning(f"{folder} auto_map")):
        LLM(str(folder))
