"""Weights, tokenizer and geometry of a model, through Transformers.

Models that the engine would serve wrongly are refused here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from tangram.compress.profile import ModelFingerprint
from tangram.config import EngineConfig, cache_folder
from tangram.errors import ModelError
from tangram.model import embedded
from tangram.model.attention import IMPLEMENTATION
from tangram.model.auto_classes import (
    make_model,
    read_config,
    read_model,
    read_tokenizer,
    without_advice,
)
from tangram.model.chat_template import read_template
from tangram.model.convert import UNREADABLE, convert_gguf, explain_fault, refuse_difference
from tangram.model.device import cpu_dtype, find_device
from tangram.model.dummy import random_model, tokenizer_or_numbers
from tangram.model.frequencies import fix_frequencies
from tangram.model.generation import NO_ADVICE, ModelDefaults, read_defaults
from tangram.model.prepare import Stage, Wanted, prepare
from tangram.model.quantized import check_quantization, held_bytes
from tangram.model.recurrent import StateShape
from tangram.model.servable import own_attention, probe_model, refuse_class, refuse_unsupported
from tangram.model.shares import distributed_config, refuse_small_weights
from tangram.model.source import EMBEDDED, find_folder, gguf_file, is_gguf
from tangram.model.weight_files import check_safetensors
from tangram.model.widened import widen
from tangram.types import Geometry

_SAMPLES = 1024  # of each tensor
# Fields of a config that change nothing of what is computed from tokens.
_LABELS = frozenset(
    {
        *("architectures", "auto_map", "dtype", "quantization_config", "transformers_version"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "use_cache"),
    }
)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to serve.

    `eos_token_ids` end an answer; `model` is in eval mode on its device. `weights_digest` is that
    of its config and of samples of all its weights. `defaults` hold where a request states nothing.
    `states` are what its recurrent layers keep of a sequence.
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    geometry: Geometry
    fingerprint: ModelFingerprint
    eos_token_ids: tuple[int, ...]
    weights_digest: str
    defaults: ModelDefaults = NO_ADVICE
    states: tuple[StateShape, ...] = ()

    @cached_property
    def exact_digest(self) -> str:
        """SHA-256 (hex) of every bit of the weights that compute; some 0.7 s a gigabyte."""
        digest = hashlib.sha256()
        tensors = self.model.state_dict() | dict(self.model.named_buffers())
        for name, tensor in sorted(tensors.items()):
            digest.update(f"{name} {list(tensor.shape)} {tensor.dtype}".encode())
            digest.update(tensor.cpu().reshape(-1).contiguous().view(torch.uint8).numpy())
        return digest.hexdigest()

    @property
    def kept_folder(self) -> Path:
        """Where is kept what was measured on exactly these weights, with this config."""
        return cache_folder() / "weights" / self.weights_digest[:16]

    def encode(self, text: str) -> list[int]:
        """The tokens of a text that the model is to read, such as one of a calibration.

        Raises `ModelError` if the model has no embedding of one.
        """
        tokens: list[int] = self.tokenizer.encode(text)
        highest, known = max(tokens, default=0), self.geometry.vocab_size
        if highest >= known:
            raise ModelError(
                f"model {self.name!r}: its tokenizer has {len(self.tokenizer)} tokens, but the "
                f"model embeds {known}, and a text has token {highest}: put the tokenizer of the "
                "same model beside its config.json"
            )
        return tokens

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights that are not rounded, and of the KV cache."""
        return self.model.dtype

    @property
    def weight_bytes(self) -> int:
        """What the weights take in memory."""
        return held_bytes(self.model)


def memory_ran_out(error: Exception) -> bool:
    """Whether `error` says that memory ran out.

    torch has an exception type for a GPU; on a CPU only the message tells.
    """
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(
        error
    )


def load_model(
    name: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    load_format: str = "auto",
    quantization: str | None = None,
    ranks: int = 1,
    generation_config: str = "none",
    max_model_len: int | None = None,
) -> LoadedModel:
    """Load `name` (`smollm2`, a Hugging Face id, a folder of safetensors or a GGUF file).

    `dtype` auto is `cpu_dtype` on a CPU and the checkpoint's own elsewhere, bfloat16 for a GGUF
    file's quantised weights. `load_format` dummy reads the config alone and makes random weights;
    without a tokenizer, tokens read as numbers. `quantization` rounds weights (int8, int4 or fp8).
    `generation_config` says whose sampling defaults hold (`read_defaults`), and `max_model_len` for
    how long sequences a rotation is (`fix_frequencies`).
    With several `ranks` each of their processes calls this, and has its part of the weights. Raises
    `ConfigError` if the device has no product of such weights, and `ModelError` with the reason if
    the model cannot be loaded, or if this engine would compute its kind of attention wrongly.
    """
    folder = resolve_source(name, weights=load_format != "dummy")
    target = find_device(device)
    if quantization is not None:
        check_quantization(quantization, target)
    config = _read_config(folder, name)
    defaults = read_defaults(name, folder, generation_config)
    chosen = _choose_dtype(name, config, dtype, target)
    is_random = load_format == "dummy"
    with _explaining_faults(name, config):
        fix_frequencies(config, max_model_len)
        if is_random:
            model = random_model(config, dtype=chosen, device=target, attention=IMPLEMENTATION)
            tokenizer = tokenizer_or_numbers(folder, config)
        else:
            if ranks > 1:
                refuse_small_weights(config, ranks)
            widen(config)
            tokenizer = read_tokenizer(folder, config=config)  # first: weights take a minute
            model = _weights(folder, config, chosen, target, ranks)
    if name == EMBEDDED:
        tokenizer.chat_template = embedded.TEMPLATE
    mapped = target.type == "cpu" and not is_random
    loaded = adopt(name, model, tokenizer, mapped=mapped, rounded=quantization)
    ends = {*loaded.eos_token_ids, *defaults.eos_token_ids}
    return replace(loaded, eos_token_ids=tuple(sorted(ends)), defaults=defaults)


def outline_model(config: EngineConfig, device: torch.device) -> PreTrainedModel:
    """The model of `config` without weights, of the dtype that it has on `device`.

    It is on the device meta. Raises `ModelError` if it cannot be loaded.
    """
    found = _read_config(resolve_source(config.model, weights=False), config.model)
    dtype = _choose_dtype(config.model, found, config.dtype, device)
    with torch.device("meta"), _explaining_faults(config.model, found):
        fix_frequencies(found, config.max_model_len)
        return make_model(found, IMPLEMENTATION, dtype)


@contextmanager
def _explaining_faults(name: str, config: PretrainedConfig) -> Iterator[None]:
    """Raise `ModelError` for what Transformers raises of model `name`."""
    try:
        yield
    except UNREADABLE as error:
        if memory_ran_out(error):
            raise
        if error.args == (IMPLEMENTATION,):  # its classes of attention have no such key
            raise own_attention(config) from error
        raise ModelError(f"model {name!r} cannot be loaded: {explain_fault(error)}") from error


def _choose_dtype(
    name: str, config: PretrainedConfig, dtype: str, target: torch.device
) -> torch.dtype:
    """The dtype of weights on `target`, by the option `dtype`."""
    stored: Any = None if is_gguf(name) else config.dtype
    return _DTYPES.get(dtype) or (cpu_dtype() if target.type == "cpu" else stored or torch.bfloat16)


def read_text_config(name: str) -> PretrainedConfig:
    """The config of the language part of `name`, whose weights are not read.

    Raises `ModelError` if there is none.
    """
    return _read_config(resolve_source(name, weights=False), name).get_text_config()


def read_vocabulary(name: str) -> dict[str, int]:
    """The ids of the tokens of `name`, whose weights are not read.

    Raises `ModelError` if there is no such model.
    """
    folder = resolve_source(name, weights=False)
    config = _read_config(folder, name)
    try:
        return read_tokenizer(folder, config=config).get_vocab()
    except UNREADABLE as error:
        raise ModelError(f"model {name!r} cannot be read: {explain_fault(error)}") from error


def _read_config(folder: Path, name: str) -> PretrainedConfig:
    try:
        config = read_config(folder, name)
    except UNREADABLE as error:
        raise ModelError(f"model {name!r} cannot be read: {explain_fault(error)}") from error
    refuse_class(config)
    refuse_unsupported(config)
    return config


def load_configured(config: EngineConfig) -> LoadedModel:
    """`load_model` with the options of `config`."""
    template = None if config.chat_template is None else read_template(config.chat_template)
    loaded = load_model(
        config.model,
        dtype=config.dtype,
        device=config.device,
        load_format=config.load_format,
        quantization=config.quantization,
        ranks=config.tensor_parallel_size,
        generation_config=config.generation_config,
        max_model_len=config.max_model_len,
    )
    if template is not None:
        loaded.tokenizer.chat_template = template
    return loaded


def _weights(
    folder: Path, config: PretrainedConfig, dtype: torch.dtype, target: torch.device, ranks: int
) -> PreTrainedModel:
    check_safetensors(folder)
    model, report = read_model(
        folder,
        config=config,
        dtype=dtype,
        attn_implementation=IMPLEMENTATION,
        device_map=None if target.type == "cpu" or ranks > 1 else target,  # straight to the device
        distributed_config=distributed_config(config, ranks) if ranks > 1 else None,
    )
    refuse_difference(str(config.name_or_path), report["missing_keys"], report["unexpected_keys"])
    return model


@without_advice()
def adopt(
    name: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    mapped: bool = False,
    rounded: str | None = None,
) -> LoadedModel:
    """Use a model that is already in memory, made with `attn_implementation="tangram"`, as `name`.

    Weights that are `mapped` from files are copied, then `rounded` as `Wanted` says. Raises
    `ModelError` if it would be served wrongly.
    """
    refuse_unsupported(model.config)
    wanted = Wanted(model.device, model.dtype, mapped=mapped, rounded=rounded)
    prepare(model, wanted, Stage.LOAD)
    geometry, states = probe_model(model)
    loaded = LoadedModel(
        name=name,
        model=model,
        tokenizer=tokenizer,
        geometry=geometry,
        fingerprint=fingerprint(model, geometry, name),
        eos_token_ids=_eos_ids(model, tokenizer),
        weights_digest=digest_weights(model),
        states=states,
    )
    prepare(model, wanted, Stage.ROUND)
    return loaded


def fingerprint(model: PreTrainedModel, geometry: Geometry, name: str) -> ModelFingerprint:
    """What a profile must match: the model's shape and a digest of its norms and biases.

    Other forms of the same weights, such as those of 8 bits, share it; so may a copy whose
    matrices alone were trained on. `digest_weights` tells these apart.
    """
    digest = hashlib.sha256()
    for key, tensor in sorted(model.state_dict().items()):
        if tensor.ndim == 1:
            digest.update(key.encode() + _narrow(_whole(tensor)))
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


def digest_weights(model: PreTrainedModel) -> str:
    """SHA-256 (hex) of samples of every tensor, and of the config that computes with them.

    Any training, rounding to 8 bits, or another window changes it. It is the same in float32 and
    bfloat16. On several devices all ranks must call this.
    """
    fields = model.config.get_text_config().to_diff_dict()
    computing = {name: value for name, value in fields.items() if name not in _LABELS}
    digest = hashlib.sha256(json.dumps(computing, sort_keys=True, default=str).encode())
    for key, tensor in sorted(model.state_dict().items()):
        # An odd step: samples must not all be of one column.
        step = max(1, tensor.numel() // _SAMPLES) | 1
        samples = _whole(tensor).reshape(-1)[::step]
        digest.update(f"{key} {list(tensor.shape)}".encode() + _narrow(samples))
    return digest.hexdigest()


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    (placement,) = tensor.placements
    if not isinstance(placement, _StridedShard):
        return tensor.full_tensor()
    # Several maps in one, each dealt to all ranks, which PyTorch 2.11 does not gather.
    mesh, dim = tensor.device_mesh, placement.dim
    dealt = DTensor.from_local(tensor.to_local(), mesh, [Shard(dim)]).full_tensor()
    ranks, maps = mesh.size(), placement.split_factor
    parts = dealt.reshape(*dealt.shape[:dim], ranks, maps, -1, *dealt.shape[dim + 1 :])
    return parts.transpose(dim, dim + 1).reshape(dealt.shape)


def _narrow(tensor: torch.Tensor) -> bytes:
    """The bytes of `tensor` in bfloat16."""
    narrow = tensor.to("cpu", torch.float32).to(torch.bfloat16)
    return narrow.contiguous().view(torch.uint8).numpy().tobytes()


def _eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    generation = getattr(model, "generation_config", None)
    listed = getattr(generation, "eos_token_id", None)
    named = [*(listed if isinstance(listed, list) else [listed]), tokenizer.eos_token_id]
    ids = [token for token in named if token is not None]
    if strange := [token for token in ids if type(token) is not int or not 0 <= token < 2**31]:
        raise ModelError(
            f"eos_token_id has {strange[0]!r}, it must be a token id or a list of them"
        )
    return tuple(sorted(set(ids)))


def resolve_source(name: str, *, weights: bool = True) -> Path:
    """The folder that Transformers loads for `name`: a GGUF file is converted, a model of the Hub
    fetched. Without `weights` its config is enough.

    Raises `ModelError` if there is none.
    """
    return convert_gguf(gguf_file(name)) if is_gguf(name) else find_folder(name, weights=weights)
