"""Weights, tokenizer and geometry of a model, through Transformers; models we would serve wrongly are refused here."""

from __future__ import annotations

import atexit
import hashlib
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from tangram.compress.profile import ModelFingerprint
from tangram.config import cache_folder
from tangram.errors import ConfigError, ModelError
from tangram.model.attention import IMPLEMENTATION, keep_hidden
from tangram.model.checks import probe_geometry, refuse_unsupported
from tangram.model.dummy import random_model, tokenizer_or_numbers
from tangram.model.files import check_gguf, check_safetensors
from tangram.model.source import gguf_file, is_gguf
from tangram.types import Geometry

# What Transformers raises for configs, weights and tokenizers that are not what they should be.
_UNREADABLE = (
    OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError, StrictDataclassError,
)  # fmt: skip
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to serve. `eos_token_ids` end an answer; `model` is in eval mode on its device."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    geometry: Geometry
    fingerprint: ModelFingerprint
    eos_token_ids: tuple[int, ...]

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and KV cache."""
        return self.model.dtype


def memory_ran_out(error: Exception) -> bool:
    """Whether there was too little memory; torch has a type of its own for a GPU, on a CPU there are only its words."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error)


def load_model(name: str, *, dtype: str = "auto", device: str = "auto", load_format: str = "auto") -> LoadedModel:
    """Load `name` (`smollm2`, a Hugging Face id, a folder of safetensors or a GGUF file).

    `dtype` auto is float32 on a CPU and the checkpoint's own elsewhere, bfloat16 for a GGUF file's quantised weights.
    `load_format` dummy takes the config alone and makes weights up; where there is no tokenizer either, tokens read as
    numbers. Raises `ModelError` with the reason if the model cannot be loaded or its attention is of a kind that this
    engine would compute wrongly.
    """
    source = _resolve(name)
    place = _place(device)
    try:
        config = AutoConfig.from_pretrained(source)
    except _UNREADABLE as error:
        raise ModelError(f"model {name!r} cannot be read: {error}") from error
    refuse_unsupported(config)
    own = None if is_gguf(name) else config.dtype
    chosen = _DTYPES.get(dtype) or (torch.float32 if place.type == "cpu" else own or torch.bfloat16)
    try:
        if load_format == "dummy":
            model = random_model(config, dtype=chosen, device=place, attention=IMPLEMENTATION)
            tokenizer = tokenizer_or_numbers(source, config.get_text_config().vocab_size)
        else:
            model = _weights(source, chosen, place)
            tokenizer = AutoTokenizer.from_pretrained(source)
    except _UNREADABLE as error:
        if memory_ran_out(error):
            raise
        raise ModelError(f"model {name!r} cannot be loaded: {error}") from error
    return adopt(name, model, tokenizer)


def _weights(source: str, dtype: torch.dtype, place: torch.device) -> PreTrainedModel:
    if Path(source).is_dir():
        check_safetensors(Path(source))
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        source, dtype=dtype, attn_implementation=IMPLEMENTATION, output_loading_info=True,
        use_safetensors=True,  # other formats are pickles, which can run anything
        device_map=None if place.type == "cpu" else place,  # straight to the device
    )  # fmt: skip
    model: PreTrainedModel
    model, report = loaded
    if missing := sorted(report["missing_keys"]):
        # Transformers would make them up.
        raise ModelError(f"model {source!r} lacks {len(missing)} tensors, {missing[0]!r} the first: fetch it again")
    return model


def adopt(name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> LoadedModel:
    """Take in a model that is already in memory, made with `attn_implementation="tangram"`, under `name`.

    Raises `ModelError` if it would be served wrongly.
    """
    refuse_unsupported(model.config)
    model.train(False).requires_grad_(False)
    geometry = probe_geometry(model)
    for module in model.modules():
        if hasattr(module, "layer_idx") and hasattr(module, "k_proj"):
            module.register_forward_pre_hook(keep_hidden, with_kwargs=True)
    return LoadedModel(
        name=name,
        model=model,
        tokenizer=tokenizer,
        geometry=geometry,
        fingerprint=fingerprint(model, geometry, name),
        eos_token_ids=_eos_ids(model, tokenizer),
    )


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of `name` alone."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(_resolve(name))
    return tokenizer


def fingerprint(model: PreTrainedModel, geometry: Geometry, name: str) -> ModelFingerprint:
    """What a profile must match: the shape of the model and a digest of its small tensors (norms and biases).

    Any training moves the norms, and they are cheap to read at every size.
    """
    digest = hashlib.sha256()
    for key, tensor in sorted(model.state_dict().items()):
        if tensor.ndim == 1:
            digest.update(key.encode())
            digest.update(tensor.to("cpu", torch.float32).to(torch.bfloat16).view(torch.uint8).numpy().tobytes())
    return ModelFingerprint(
        name=name,
        architecture=str(model.config.get_text_config().model_type),
        layers=geometry.layers,
        kv_heads=geometry.kv_heads,
        query_heads=geometry.query_heads,
        head_dim=geometry.head_dim,
        vocab_size=geometry.vocab_size,
        weights_sha256=digest.hexdigest(),
    )


def _place(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device is {device!r}, it must be auto, cpu or cuda") from error
    if place.type not in ("cpu", "cuda"):
        raise ConfigError(f"device is {device!r}, kernels exist for cpu and cuda: choose one of them")
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is {device!r}, but PyTorch {torch.__version__} sees no GPU here: use cpu")
    if place.index:
        # Triton launches on the current device of a thread, and an engine has threads of its own.
        raise ConfigError(
            f"device is {device!r}, an engine takes the first GPU it sees: set "
            f"CUDA_VISIBLE_DEVICES={place.index} and use cuda"
        )
    return place


def _eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    generation = getattr(model, "generation_config", None)
    listed = getattr(generation, "eos_token_id", None)
    ids = set(listed if isinstance(listed, list) else [listed]) | {tokenizer.eos_token_id}
    return tuple(sorted(token for token in ids if token is not None))


def _resolve(name: str) -> str:
    """A folder or hub id that Transformers loads without conversion."""
    if is_gguf(name):
        return str(_converted(gguf_file(name)))
    path = Path(name).expanduser()
    return str(path) if path.is_dir() else name


def _converted(gguf: Path) -> Path:
    """The safetensors twin of a GGUF file, made on first use (Transformers reads GGUF, but takes ~17 s each time).

    Where the cache folder cannot be written it lives as long as the process.
    """
    status = gguf.stat()
    identity = hashlib.sha256(f"{gguf.name}:{status.st_size}".encode())
    with gguf.open("rb") as file:
        identity.update(file.read(1 << 20))
    target = cache_folder() / "models" / f"{gguf.stem}-{identity.hexdigest()[:16]}"
    try:
        if not (target / "config.json").is_file():
            _convert(gguf, target)
        return target
    except OSError as error:
        log = transformers_logging.get_logger("tangram")
        log.warning("what %s is converted to cannot be kept: %s", gguf.name, error)
    folder = tempfile.mkdtemp(prefix="tangram-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    try:
        _convert(gguf, Path(folder) / target.name)
    except OSError as error:
        raise ModelError(f"{gguf} cannot be converted, set TANGRAM_CACHE to a folder with room: {error}") from error
    return Path(folder) / target.name


def _convert(gguf: Path, target: Path) -> None:
    """Raises `OSError` if `target` cannot be written, `ModelError` if the file cannot be read."""
    transformers_logging.get_logger("tangram").warning("converting %s once, this takes some 20 s", gguf.name)
    target.parent.mkdir(parents=True, exist_ok=True)
    check_gguf(gguf)
    work = Path(tempfile.mkdtemp(dir=target.parent))
    try:
        options: dict[str, Any] = {"gguf_file": gguf.name}
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **options)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **options)
    except _UNREADABLE as error:
        shutil.rmtree(work, ignore_errors=True)
        raise ModelError(f"{gguf} cannot be converted: {error}") from error
    # The weights are plain floats now; Transformers refuses to save what it still takes for quantised.
    vars(model).update(hf_quantizer=None, is_quantized=False)
    del model.config.quantization_config
    try:
        model.save_pretrained(work)
        tokenizer.save_pretrained(work)
        # A rename is atomic: whoever comes second finds the folder whole and throws its own copy away.
        if not target.exists():
            work.rename(target)
    except SafetensorError as error:  # that of a full disk
        raise OSError(str(error)) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
