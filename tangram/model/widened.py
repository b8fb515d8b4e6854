"""Checkpoints with quantised weights: Transformers widens them as it loads, or they are refused.

A widened weight is the number that the quantised one stands for, in the dtype of the model.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from transformers import PretrainedConfig

from tangram.errors import ModelError

# The methods that Transformers widens, each with the package that reads it.
WIDENED: dict[str, str | None] = {
    "fp8": None,
    "mxfp8": None,
    "mxfp4": None,
    "compressed-tensors": "compressed_tensors",
}
_GPTQMODEL = "is read by gptqmodel, which is built against one version of PyTorch"
_OWN_TENSORS = "keeps weights in tensors of its own kind"
# Why others are not; "cannot be widened" is the reason for those that are not here.
_REASONS = {
    "awq": _GPTQMODEL,
    "gptq": _GPTQMODEL,
    "bitsandbytes": _OWN_TENSORS,
    "torchao": _OWN_TENSORS,
}


def widen(config: PretrainedConfig) -> None:
    """Ask Transformers, through `config`, to widen quantised weights.

    Raises `ModelError` naming the method if it cannot.
    """
    given: Any = getattr(config, "quantization_config", None)
    if given is None:
        return
    method = given.get("quant_method") if isinstance(given, dict) else given
    name = getattr(config, "model_type", "?")
    if method not in WIDENED:
        raise ModelError(
            f"{name}: quantization_config.quant_method is {method!r}, which "
            f"{_REASONS.get(str(method), 'cannot be widened')}; {', '.join(WIDENED)} can be: take "
            "the model with plain weights, and --quantization int4 or int8"
        )
    package = WIDENED[method]
    if package is not None and find_spec(package) is None:
        raise ModelError(
            f"{name}: quantization_config.quant_method is {method!r}, which needs a package: "
            f"pip install {method}"
        )
    given["dequantize"] = True
