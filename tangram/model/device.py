"""Which device a model runs on."""

from __future__ import annotations

import logging

import torch

from tangram.errors import ConfigError
from tangram.kernels.triton.card import explain_unserved

_log = logging.getLogger("tangram")


def find_device(device: str) -> torch.device:
    """The device of that name; auto is the GPU if the kernels run on it, otherwise the CPU.

    Raises `ConfigError` for a device that does not exist, or that the kernels do not run on.
    """
    if device == "auto":
        return _find()
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device is {device!r}, it must be auto, cpu or cuda") from error
    if found.type not in ("cpu", "cuda"):
        raise ConfigError(f"device is {device!r}, kernels exist for cpu and cuda: choose one")
    if found.type == "cuda" and not torch.cuda.is_available():
        seen = f"PyTorch {torch.__version__} sees no GPU here"
        raise ConfigError(f"device is {device!r}, but {seen}: use cpu")
    if found.index:
        # Triton launches on the current device of a thread, and an engine has threads of its own.
        raise ConfigError(
            f"device is {device!r}, an engine takes the first GPU it sees: set "
            f"CUDA_VISIBLE_DEVICES={found.index} and use cuda"
        )
    if found.type == "cuda" and (why := explain_unserved()) is not None:
        raise ConfigError(f"device is {device!r}, but {why}: use cpu")
    return found


def cpu_dtype() -> torch.dtype:
    """The dtype that this CPU serves best: bfloat16 if it has products of it, otherwise float32."""
    has_products = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if has_products else torch.float32


def _find() -> torch.device:
    if torch.cuda.is_available():
        why = explain_unserved()
        if why is None:
            return torch.device("cuda")
        _log.warning("%s: running on the CPU", why)
    elif torch.backends.mps.is_available():
        _log.warning("there are no kernels for Apple's GPU: running on the CPU")
    return torch.device("cpu")
