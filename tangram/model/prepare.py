"""What changes a model between its files and an engine: one list, `STEPS`, in order.

`tangram serve --explain` prints it. Between its four stages something looks at the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from itertools import chain

import torch
from transformers import PreTrainedModel

from tangram.config import EngineConfig
from tangram.errors import ConfigError
from tangram.model.attention import show_hidden
from tangram.model.compiled import compile_layers
from tangram.model.cpu_weights import can_pack, is_amd, multiply_few_rows_fast, pack_weights
from tangram.model.experts import fix_launches, launches_vary
from tangram.model.fused import join_projections
from tangram.model.latent import has_latents, pass_latents
from tangram.model.modules import copy_function
from tangram.model.positions import find_counting, tell_positions
from tangram.model.quantized import quantize
from tangram.model.recurrent import has_states, take_rows_apart
from tangram.model.shares import Share, take_share


class Stage(Enum):
    """When steps run."""

    LOAD = "before the model is asked for its shape, and its weights are digested"
    ROUND = "before the model is calibrated, if it has no profile"
    SHARE = "once the profile has dealt the heads"
    SERVE = "when an engine is made; another one of the same model finds it done"


@dataclass(frozen=True)
class Wanted:
    """What a model is prepared for.

    Its weights may be `mapped` from files. They are of `dtype`, or `rounded` to int8, int4 or fp8.
    One of several `ranks` has a `share`. With `graphs` passes are CUDA graphs.
    """

    device: torch.device
    dtype: torch.dtype
    mapped: bool = False
    rounded: str | None = None
    ranks: int = 1
    share: Share | None = None
    graphs: bool = False
    chunk_tokens: int = EngineConfig.chunk_tokens
    compile_decode: bool = False

    @classmethod
    def of(cls, config: EngineConfig, device: torch.device, dtype: torch.dtype) -> Wanted:
        """What an engine of `config` wants on `device`."""
        return cls(
            device,
            dtype,
            mapped=device.type == "cpu" and config.load_format != "dummy",
            rounded=config.quantization,
            ranks=config.tensor_parallel_size,
            graphs=device.type == "cuda" and not config.enforce_eager,
            chunk_tokens=config.chunk_tokens,
            compile_decode=config.compile_decode,
        )

    @property
    def on_cpu(self) -> bool:
        """Whether a CPU computes."""
        return self.device.type == "cpu"

    def is_plain(self, dtype: torch.dtype) -> bool:
        """Whether a CPU multiplies weights of `dtype` that are not rounded."""
        return self.on_cpu and self.dtype is dtype and self.rounded is None


@dataclass(frozen=True)
class ModelStep:
    """One change of a model, and in words what it `needs` to apply and what it `leaves`.

    Whether it applies can be asked of a model on the device meta, too.
    """

    name: str
    stage: Stage
    needs: str
    leaves: str
    applies: Callable[[PreTrainedModel, Wanted], bool]
    run: Callable[[PreTrainedModel, Wanted], object]


def prepare(model: PreTrainedModel, wanted: Wanted, stage: Stage) -> None:
    """Run the steps of `stage` that apply. Raises `ConfigError` and `ModelError` if one cannot."""
    for step in STEPS:
        if step.stage is stage and step.applies(model, wanted):
            step.run(model, wanted)


def check_compile_decode(device: torch.device) -> None:
    """Raise `ConfigError` if layers that decode cannot be compiled on `device`."""
    try:
        from tangram.model.compiled_decode import check_compiler
    except ImportError as error:
        raise ConfigError(
            f"compile_decode needs a newer torch, this is {torch.__version__}: install torch "
            "2.13, or leave it out"
        ) from error
    check_compiler(device)


def _compile_decode(model: PreTrainedModel, wanted: Wanted) -> None:
    check_compile_decode(wanted.device)
    from tangram.model.compiled_decode import compile_decode

    compile_decode(model)


def _round(model: PreTrainedModel, wanted: Wanted) -> None:
    if wanted.rounded is not None:
        quantize(model, wanted.rounded)


def _share(model: PreTrainedModel, wanted: Wanted) -> None:
    if wanted.share is not None:
        take_share(model, wanted.share)


def _detach(model: PreTrainedModel, wanted: Wanted) -> None:
    for tensor in chain(model.parameters(), model.buffers()):
        tensor.data = tensor.detach().clone()


def _show_hidden(model: PreTrainedModel, wanted: Wanted) -> None:
    hook = copy_function(show_hidden)
    for module in model.modules():
        if hasattr(module, "layer_idx") and (hasattr(module, "k_proj") or has_latents(module)):
            module.register_forward_pre_hook(hook, with_kwargs=True)


STEPS = (
    ModelStep(
        "detach",
        Stage.LOAD,
        "weights of files, on a CPU",
        "weights that stay if somebody overwrites or shortens their file",
        lambda model, wanted: wanted.mapped,
        _detach,
    ),
    ModelStep(
        "infer",
        Stage.LOAD,
        "any model",
        "no dropout, no gradients",
        lambda model, wanted: True,
        lambda model, wanted: model.train(False).requires_grad_(False),
    ),
    ModelStep(
        "latents",
        Stage.LOAD,
        "latent attention",
        "attention that gets latents, not the keys and values of all heads",
        lambda model, wanted: any(map(has_latents, model.modules())),
        lambda model, wanted: pass_latents(model),
    ),
    ModelStep(
        "rows",
        Stage.LOAD,
        "recurrent layers or convolutions",
        "mixers that compute each row of a pass by itself, from its state",
        lambda model, wanted: has_states(model),
        lambda model, wanted: take_rows_apart(model),
    ),
    ModelStep(
        "positions",
        Stage.LOAD,
        "attention that counts the tokens before those of a pass",
        "layers that tell it the positions",
        lambda model, wanted: bool(find_counting(model)),
        lambda model, wanted: tell_positions(model),
    ),
    ModelStep(
        "hidden",
        Stage.LOAD,
        "any model",
        "attention that is given the input of its block, which gates score",
        lambda model, wanted: True,
        _show_hidden,
    ),
    ModelStep(
        "round",
        Stage.ROUND,
        "--quantization",
        "linear maps that are joined and have weights of 8 or 4 bits",
        lambda model, wanted: wanted.rounded is not None,
        _round,
    ),
    ModelStep(
        "share",
        Stage.SHARE,
        "--tensor-parallel-size above 1",
        "the heads, rows and columns of one rank, in plain linear maps",
        lambda model, wanted: wanted.ranks > 1,
        _share,
    ),
    ModelStep(
        "join",
        Stage.SERVE,
        "a CPU or CUDA graphs, no --quantization",
        "one product for queries, keys and values, and one for gate and up",
        lambda model, wanted: wanted.rounded is None and (wanted.on_cpu or wanted.graphs),
        lambda model, wanted: join_projections(model),
    ),
    ModelStep(
        "experts",
        Stage.SERVE,
        "CUDA graphs, and kernels that depend on the choice of experts",
        "the same launches wherever tokens are sent",
        lambda model, wanted: wanted.graphs and launches_vary(model, wanted.device),
        lambda model, wanted: fix_launches(model),
    ),
    ModelStep(
        "compile",
        Stage.SERVE,
        "CUDA graphs",
        "layers, and a rounded head, that torch.compile compiles at their first call",
        lambda model, wanted: wanted.graphs,
        lambda model, wanted: compile_layers(model),
    ),
    ModelStep(
        "few rows",
        Stage.SERVE,
        "float32 on a CPU of AMD, no --quantization",
        "large linear maps that multiply up to 16 rows as (W·xᵀ)ᵀ",
        lambda model, wanted: wanted.is_plain(torch.float32) and is_amd(),
        lambda model, wanted: multiply_few_rows_fast(model, wanted.chunk_tokens),
    ),
    ModelStep(
        "pack",
        Stage.SERVE,
        "bfloat16 on an x86 CPU with oneDNN, no --quantization",
        "weights in the order in which oneDNN reads them",
        lambda model, wanted: wanted.is_plain(torch.bfloat16) and can_pack(),
        lambda model, wanted: pack_weights(model),
    ),
    ModelStep(
        "compile decode",
        Stage.SERVE,
        "--compile-decode",
        "layers that torch.compile compiles for passes that only decode",
        lambda model, wanted: wanted.compile_decode,
        _compile_decode,
    ),
)
