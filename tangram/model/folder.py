"""The files of a model's folder, checked before anything reads them. Needs no torch."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

from tangram.errors import ConfigError, ModelError
from tangram.foreign_files import parse_json, read_text
from tangram.model.config_json import read_content, refuse_parts

CONFIG, ADAPTER, INDEX = "config.json", "adapter_config.json", "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
# What Transformers reads of a folder, except weights.
DESCRIPTION = (
    *("*.json", "*.jinja", "*.model", "*.model.*", "*.txt", "*.tiktoken", "*.spm", "vocab*"),
    "bpe.codes",
)
# Transformers makes a tokenizer without a vocabulary if a folder has none of these.
_VOCABULARY = re.compile(
    r"tokenizer\.(.+\.)?json|tekken\.json|vocab.*|.+\.(model|tiktoken|spm)(\.v\d+)?|dict\.txt"
)
_PICKLE = re.compile(r".+\.(bin|pt|pth|ckpt|pkl)")
_SHARD = re.compile(r"[^/\\\0]+\.safetensors")
_NAMED_AS_FILE = re.compile(r".+\.(json|jinja|safetensors|model|txt|gguf)")
_TEMPLATES = "additional_chat_templates"
_MERGE = "merge it into its base model (merge_and_unload of peft) and name the folder of the result"


def check_folder(folder: Path, name: str, *, weights: bool) -> None:
    """Raise `ModelError` unless `folder` is that of a whole model, which is called `name`.

    Every file must be a regular one or a link to it: reading a pipe would block for ever. With
    `weights` there must be safetensors and a tokenizer.
    """
    names = _check_files(folder, name)
    if ADAPTER in names:
        raise _explain_adapter(folder, name, names)
    if CONFIG not in names:
        raise ModelError(_lacks_config(name, names))
    try:
        refuse_parts(name, read_content(folder / CONFIG))
    except ConfigError as error:
        raise ModelError(f"model {name!r} cannot be read: {error}") from error
    if weights:
        _check_weights(folder, name, names)
        if not has_vocabulary(folder):
            raise ModelError(
                f"model {name!r}: the folder has no tokenizer: put tokenizer.json, and "
                "tokenizer_config.json, of the same model beside its config.json"
            )


def has_vocabulary(folder: Path) -> bool:
    """Whether the folder has a file of which a tokenizer can be made."""
    return any(_VOCABULARY.fullmatch(entry.name) for entry in folder.iterdir())


def _check_files(folder: Path, name: str) -> set[str]:
    """The names of its files. Raises `ModelError` if one is no regular file."""
    names = set()
    for entry in _entries(folder):
        try:
            mode = entry.stat().st_mode
        except OSError as error:
            raise ModelError(
                f"model {name!r}: {entry.name} cannot be read ({error.strerror}): remove it, or "
                "fetch the model again"
            ) from error
        if stat.S_ISREG(mode):
            names.add(entry.name)
        elif not stat.S_ISDIR(mode) or _NAMED_AS_FILE.fullmatch(entry.name):
            raise ModelError(
                f"model {name!r}: {entry.name} is not a regular file, as all files of a model must "
                "be: remove it, or fetch the model again"
            )
    return names


def _entries(folder: Path) -> Iterator[Path]:
    try:
        yield from sorted(folder.iterdir())
        if (folder / _TEMPLATES).is_dir():
            yield from sorted((folder / _TEMPLATES).iterdir())
    except OSError as error:
        raise ModelError(f"model {str(folder)!r} cannot be read: {error.strerror}") from error


def _explain_adapter(folder: Path, name: str, names: set[str]) -> ModelError:
    if CONFIG in names:
        return ModelError(
            f"model {name!r}: the folder has {ADAPTER} beside {CONFIG}, and adapters are not "
            f"applied: {_MERGE}, or remove {ADAPTER} to serve the model without the adapter"
        )
    try:
        content: Any = parse_json(read_text(folder / ADAPTER))
    except (OSError, ValueError):
        content = None
    base = content.get("base_model_name_or_path") if isinstance(content, dict) else None
    of = base or "another model"
    return ModelError(f"model {name!r} is an adapter (LoRA) of {of}, no whole model: {_MERGE}")


def _lacks_config(name: str, names: set[str]) -> str:
    if files := sorted(file for file in names if file.lower().endswith(".gguf")):
        return f"model {name!r} is a folder with the GGUF file {files[0]}: give the file's own path"
    return f"model {name!r}: the folder has no {CONFIG}, name one that Transformers has saved"


def _check_weights(folder: Path, name: str, names: set[str]) -> None:
    if INDEX in names:
        shards = read_shards(folder / INDEX)
        if WEIGHTS in names - shards:  # Transformers would read that one, and no shard
            raise ModelError(
                f"model {name!r} has its weights twice, in {WEIGHTS} and in the files that {INDEX} "
                "lists: remove one or the other"
            )
        if lacking := sorted(shards - names):
            raise ModelError(
                f"model {name!r} lacks {len(lacking)} files of weights, {lacking[0]} the first: "
                "fetch the model again"
            )
    elif WEIGHTS not in names:
        pickles = sorted(file for file in names if _PICKLE.fullmatch(file))
        if pickles:
            raise ModelError(
                f"model {name!r} has its weights in {pickles[0]} alone. Such a file is a pickle, "
                "which can run code, and is never read: give a copy of the model in safetensors"
            )
        raise ModelError(
            f"model {name!r}: the folder has neither {WEIGHTS} nor {INDEX}: fetch the model's "
            "weights in safetensors"
        )


def read_shards(index: Path) -> set[str]:
    """The names of the weight files that an index lists.

    Raises `ModelError` unless all are safetensors files of its own folder: others could be
    pickles, which can run code.
    """
    try:
        files = set(parse_json(read_text(index))["weight_map"].values())
        if not files:
            raise ValueError("it lists no file")
        strange = next((file for file in files if not _SHARD.fullmatch(file)), None)
    except (AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        raise report_damage(index) from error
    if strange is not None:
        raise ModelError(
            f"model index {str(index)!r} names the file {shortened(strange)}: only *.safetensors "
            "files of its own folder are read"
        )
    return files


def report_damage(path: Path) -> ModelError:
    """The error about a file of a model that is not what its name says."""
    return ModelError(
        f"model file {str(path)!r} is damaged or was cut short: fetch it again and compare its "
        "checksum"
    )
