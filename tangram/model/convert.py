"""GGUF files converted to safetensors once and kept. Missing or surplus tensors are refused."""

from __future__ import annotations

import atexit
import fcntl
import logging
import shutil
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)

from tangram.config import cache_folder
from tangram.errors import ModelError
from tangram.model.auto_classes import read_model, read_tokenizer, without_advice
from tangram.model.file_digest import file_digest
from tangram.model.weight_files import check_gguf, check_safetensors, gguf_tensor_names

# What Transformers raises for unreadable configs, weights and tokenizers.
UNREADABLE = (
    ArithmeticError,
    AssertionError,
    ImportError,
    LookupError,
    OSError,
    ValueError,
    TypeError,
    AttributeError,
    RuntimeError,
    SafetensorError,
    StrictDataclassError,
)
# Of these the text alone is no sentence: a key, or nothing.
_BARE = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError)
_WORK, _LOCK = "converting-", "lock"
_STALE_S = 3600  # a work folder without a lock belongs to a process that died before it took one
_log = logging.getLogger("tangram")


def convert_gguf(gguf: Path) -> Path:
    """The folder of safetensors with the tensors of `gguf`, made on first use.

    Transformers reads GGUF files too, but takes some 17 s each time. A kept folder that is damaged
    is renamed, and the file is converted again. Where the cache folder cannot be written, the
    result exists as long as the process. Raises `ModelError` if the file cannot be converted.
    """
    digest = _digest(gguf)
    # Another version of Transformers may read the same file otherwise.
    identity = sha256(f"{digest} {transformers.__version__}".encode()).hexdigest()
    target = cache_folder() / "models" / f"{gguf.stem}-{identity[:16]}"
    try:
        if not _is_whole(target):
            _convert(gguf, digest, target)
        return target
    except OSError as error:
        _log.warning("the conversion of %s cannot be kept: %s", gguf.name, error)
    folder = tempfile.mkdtemp(prefix="tangram-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    try:
        _convert(gguf, digest, Path(folder) / target.name)
    except OSError as error:
        raise ModelError(
            f"{gguf} cannot be converted, set TANGRAM_CACHE to a folder with free space: {error}"
        ) from error
    return Path(folder) / target.name


def explain_fault(error: Exception) -> str:
    """What to tell of an error among `UNREADABLE`: where to look, if its text is no sentence."""
    if not isinstance(error, _BARE):
        return str(error)
    return (
        f"Transformers can make nothing of its files ({type(error).__name__}: {error}): compare "
        "config.json and tokenizer_config.json with those of a published model"
    )


def refuse_difference(source: str, missing: Collection[str], surplus: Collection[str]) -> None:
    """Raise `ModelError` unless `source` has exactly the tensors that its config describes.

    Transformers would fill in missing tensors and leave out surplus ones.
    """
    if missing:
        raise ModelError(
            f"model {source!r} lacks {len(missing)} tensors, {min(missing)!r} the first: fetch it "
            "again"
        )
    if surplus:
        raise ModelError(
            f"model {source!r} has {len(surplus)} tensors that its config has no place for, "
            f"{min(surplus)!r} the first: fetch config and weights again, of one version"
        )


def _is_whole(folder: Path) -> bool:
    """Whether a kept conversion can be used. A damaged one is renamed and reported."""
    if not folder.exists():
        return False
    try:
        check_safetensors(folder)
        wanted = ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors*")
        if all(any(folder.glob(name)) for name in wanted):
            return True
    except ModelError:
        pass
    aside = Path(tempfile.mkdtemp(prefix=f"{folder.name}.damaged-", dir=folder.parent))
    _log.warning(
        "converted weights in %s are damaged: moved to %s, converting again", folder, aside
    )
    with suppress(FileNotFoundError):  # another process moved it first
        folder.rename(aside)
    return False


@contextmanager
def _work_folder(parent: Path) -> Iterator[Path]:
    """A folder beside the target, removed at the end.

    Folders of killed processes are removed too.
    """
    for old in parent.glob(f"{_WORK}*"):
        if _is_abandoned(old):
            shutil.rmtree(old, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=_WORK, dir=parent))
    try:
        with (work / _LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the system releases it however the process ends
            yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _is_abandoned(work: Path) -> bool:
    try:
        with (work / _LOCK).open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except BlockingIOError:
        return False
    except OSError:
        return work.exists() and time.time() - work.stat().st_mtime > _STALE_S


def _digest(gguf: Path) -> str:
    return file_digest(gguf, cache_folder() / "digests")


@without_advice()
def _convert(gguf: Path, digest: str, target: Path) -> None:
    """Raises `OSError` if `target` cannot be written.

    Raises `ModelError` if the file cannot be read, or has another digest in the end.
    """
    _log.warning("converting %s once, this takes some 20 s", gguf.name)
    target.parent.mkdir(parents=True, exist_ok=True)
    check_gguf(gguf)
    with _work_folder(target.parent) as work:
        alone = work / "alone"  # Transformers would read the configs that lie beside the file
        alone.mkdir()
        (alone / gguf.name).symlink_to(gguf.absolute())
        try:
            model, report = read_model(alone, gguf_file=gguf.name, dtype=torch.float32)
            refuse_difference(str(gguf), report["missing_keys"], report["unexpected_keys"])
            refuse_difference(str(gguf), (), _unread(gguf, model))
            tokenizer = read_tokenizer(alone, gguf_file=gguf.name)
        except UNREADABLE as error:
            raise ModelError(f"{gguf} cannot be converted: {explain_fault(error)}") from error
        # The weights are plain floats now; Transformers refuses to save models marked as quantised.
        vars(model).update(hf_quantizer=None, is_quantized=False)
        del model.config.quantization_config
        made = work / target.name
        try:
            model.save_pretrained(made)
            tokenizer.save_pretrained(made)
        except SafetensorError as error:  # raised when the disk is full
            raise OSError(str(error)) from error
        if _digest(gguf) != digest:
            raise ModelError(f"{gguf} was replaced while it was converted: start again")
        # A rename is atomic: a second process finds the folder whole and drops its own.
        if not target.exists():
            made.rename(target)


def _unread(gguf: Path, model: PreTrainedModel) -> set[str]:
    """The tensors of the file that Transformers has no place for and silently leaves out."""
    config = model.config
    kind = str(config.model_type).replace("_", "")
    processor: Any = TENSOR_PROCESSORS.get(
        kind, TENSOR_PROCESSORS.get(config.model_type, TensorProcessor)
    )
    # transformers <6: its own map of names, the one that it loads by.
    read: Any = get_gguf_hf_weights_map
    known = set(read(model, processor(config=config.to_dict())))
    return {
        name
        for name in gguf_tensor_names(gguf)
        if name not in known and name.rpartition(".")[0] not in known
    }
