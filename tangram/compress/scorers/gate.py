"""Fast KVzip's gate: its checked safetensors file, and the forward pass of one layer.

The tensors are those of the released gates. A gate file holds one state dict a layer, with tensors
named `<layer>.<name>`. With d the gate's own head dim and S its sinks:

    q_proj.weight [H·G·d, hidden]   q_proj.bias [H·G·d]   q_norm.weight [d]   k_base [H, 1, S, d]
    k_proj.weight [H·d, hidden]                           k_norm.weight [d]   b      [H, 1, G]

The metadata of a gate that was trained here says how: `training` is the JSON of a `GateTraining`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from torch.nn import functional

from tangram.compress.provenance import GateTraining, ModelFingerprint
from tangram.errors import ConfigError
from tangram.foreign_files import replace_file
from tangram.types import Int64

NAMES = (
    "q_proj.weight",
    "q_proj.bias",
    "k_proj.weight",
    "q_norm.weight",
    "k_norm.weight",
    "k_base",
    "b",
)
NORM_EPSILON = 1e-6
METADATA = "training"
# Not safetensors, no file, a layer name that is no number, or a missing layer.
UNREADABLE = (SafetensorError, OSError, ValueError, KeyError)
_TRAINING = TypeAdapter(GateTraining)
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GateShape:
    """The dimensions of a gate: `layers`, hidden size, H, G, its own head dim d and its sinks S."""

    layers: int
    hidden: int
    kv_heads: int
    group_size: int
    head_dim: int
    sinks: int

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor of a layer."""
        key_rows = self.kv_heads * self.head_dim
        return {
            "q_proj.weight": (key_rows * self.group_size, self.hidden),
            "q_proj.bias": (key_rows * self.group_size,),
            "k_proj.weight": (key_rows, self.hidden),
            "q_norm.weight": (self.head_dim,),
            "k_norm.weight": (self.head_dim,),
            "k_base": (self.kv_heads, 1, self.sinks, self.head_dim),
            "b": (self.kv_heads, 1, self.group_size),
        }


@dataclass(frozen=True)
class Gate:
    """A gate in memory: `layers[l]` maps each name of the format to a float32 tensor.

    `training` is None for a file without that metadata, such as a converted one.
    """

    shape: GateShape
    layers: tuple[dict[str, Tensor], ...]
    training: GateTraining | None = None

    def to(self, device: torch.device) -> Gate:
        """The gate on `device`; itself if it is there already."""
        if self.layers[0]["b"].device == device:
            return self
        moved = (
            {name: tensor.to(device) for name, tensor in layer.items()} for layer in self.layers
        )
        return replace(self, layers=tuple(moved))

    def of_heads(self, heads: Int64) -> Gate:
        """The gate of the KV heads `heads` [layers, h] alone."""
        shape = replace(self.shape, kv_heads=heads.shape[1])
        layers = tuple(
            {
                name: tensor
                if name in ("q_norm.weight", "k_norm.weight")
                else tensor.reshape(self.shape.kv_heads, -1, *tensor.shape[1:])[mine].flatten(0, 1)
                for name, tensor in layer.items()
            }
            for layer, mine in zip(self.layers, torch.from_numpy(heads.copy()), strict=True)
        )
        return replace(self, shape=shape, layers=layers)

    def score(self, layer: int, hidden: Tensor) -> Tensor:
        """[H, C] float32 in (0, 1): the gate of one layer over `hidden` [C, hidden]."""
        return gate_scores(self.layers[layer], self.shape, hidden)


def gate_scores(weights: Mapping[str, Tensor], shape: GateShape, hidden: Tensor) -> Tensor:
    """[H, C] float32 in (0, 1): the gate of one layer over `hidden` [C, hidden].

    `weights` are the layer's tensors by name. A key competes with S learned keys for the query of
    its own token. Its score is its share, averaged over the group (Fast KVzip).
    """
    scale = shape.head_dim**-0.5
    queries = functional.linear(hidden.float(), weights["q_proj.weight"], weights["q_proj.bias"])
    keys = functional.linear(hidden.float(), weights["k_proj.weight"])
    queries = queries.reshape(-1, shape.kv_heads, shape.group_size, shape.head_dim)
    queries = functional.rms_norm(
        queries, (shape.head_dim,), weights["q_norm.weight"], NORM_EPSILON
    )
    keys = keys.reshape(-1, shape.kv_heads, shape.head_dim)
    keys = functional.rms_norm(keys, (shape.head_dim,), weights["k_norm.weight"], NORM_EPSILON)
    logits = torch.einsum("chgd,chd->hcg", queries, keys) * scale + weights["b"]
    base = torch.einsum("chgd,hsd->hcgs", queries, weights["k_base"].squeeze(1)) * scale
    return torch.sigmoid(logits - base.logsumexp(dim=-1)).mean(dim=-1)


def save_gate(path: Path, gate: Gate) -> None:
    """Write `gate` as safetensors in float16, whole or not at all; equal gates give equal bytes.

    Raises `ConfigError` as `check_path` does.
    """
    check_path(path)
    tensors = {
        f"{n}.{name}": layer[name].cpu().half().contiguous()
        for n, layer in enumerate(gate.layers)
        for name in NAMES
    }
    metadata = (
        None if gate.training is None else {METADATA: _TRAINING.dump_json(gate.training).decode()}
    )
    with replace_file(path) as file:
        file.write_bytes(save(tensors, metadata))


def check_path(path: Path) -> None:
    """Raise `ConfigError` if no gate can be written to `path`. Call it before a training."""
    if path.suffix != ".safetensors":
        raise ConfigError(
            f"train_gate is {str(path)!r}, a gate is written as safetensors: give it the suffix "
            ".safetensors"
        )
    if path.is_dir():
        raise ConfigError(f"train_gate is {str(path)!r}, this is a folder: give the path of a file")
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.touch()
        partial.unlink()
    except OSError as error:
        raise ConfigError(
            f"train_gate is {str(path)!r}, it cannot be written there: {error.strerror}"
        ) from error


def load_gate(path: Path) -> Gate:
    """Read a gate file. `ConfigError` names the file and its first fault."""
    with _reading(path):
        layers, metadata = _read(path)
    if not layers:
        raise ConfigError(f"gate is {str(path)!r}, it holds no layers")
    shape = _read_shape(path, layers)
    for layer, tensors in enumerate(layers):
        _check_layer(path, layer, tensors, shape)
    floats = tuple({name: layer[name].float() for name in NAMES} for layer in layers)
    return Gate(shape, floats, _read_training(path, metadata))


def find_shipped_gates() -> Path:
    """The folder of the gates that come with Tangram."""
    return Path(__file__).parents[2] / "gates"


def find_gate(folder: Path, model: ModelFingerprint) -> Path | None:
    """The first `*.safetensors` of `folder`, by name, trained for exactly these weights, or None.

    Reads metadata, no tensors. A file that is no gate is skipped with a logged warning that says
    why.
    """
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with _reading(path), safe_open(path, "pt") as file:
                metadata: Mapping[str, str] = file.metadata() or {}
            training = _read_training(path, metadata)
        except ConfigError as error:
            _log.warning("passed over: %s", error)
            continue
        # Unlike in `mismatches`, an unknown value matches nothing.
        if training and model.weights_sha256 and replace(training.model, name=model.name) == model:
            return path
    return None


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raise faults of the file as `ConfigError`."""
    try:
        if path.exists() and not path.is_file():
            raise OSError("it is not a regular file")  # a pipe would block for ever
        yield
    except FileNotFoundError:
        raise ConfigError(f"gate is {str(path)!r}, there is no such file") from None
    except UNREADABLE as error:
        raise ConfigError(
            f"gate is {str(path)!r}, it cannot be read as a Fast KVzip gate: {error}. Gates are "
            "safetensors files; docs/scorers.md says under 'Gate files' how to convert a released "
            "one, which is a PyTorch file"
        ) from error


def _read(path: Path) -> tuple[list[Mapping[str, Tensor]], Mapping[str, str]]:
    layers: dict[int, dict[str, Tensor]] = {}
    with safe_open(path, "pt") as file:
        metadata: Mapping[str, str] = file.metadata() or {}
        for name in file.keys():  # noqa: SIM118 (it is no dict)
            layer, _, rest = name.partition(".")
            tensor = file.get_tensor(name).clone()  # what it gives maps the file
            layers.setdefault(int(layer), {})[rest] = tensor
    return [layers[layer] for layer in range(len(layers))], metadata


def _read_training(path: Path, metadata: Mapping[str, str]) -> GateTraining | None:
    if METADATA not in metadata:
        return None
    try:
        return _TRAINING.validate_json(metadata[METADATA])
    except ValidationError as error:
        raise ConfigError(
            f"gate is {str(path)!r}, its metadata {METADATA!r} is damaged: {error}"
        ) from error


def _read_shape(path: Path, layers: list[Mapping[str, Tensor]]) -> GateShape:
    """The shape of layer 0; `_check_layer` compares every layer with it, this one too."""
    _check_names(path, 0, layers[0])
    base, bias, keys = layers[0]["k_base"], layers[0]["b"], layers[0]["k_proj.weight"]
    for name, tensor, dims in (("k_base", base, 4), ("b", bias, 3), ("k_proj.weight", keys, 2)):
        if tensor.ndim != dims or 0 in tensor.shape:
            raise ConfigError(
                f"gate is {str(path)!r}, layer 0 has {name} of shape {list(tensor.shape)}, it must "
                f"have {dims} dimensions, none of them empty"
            )
    return GateShape(
        layers=len(layers),
        hidden=keys.shape[1],
        kv_heads=base.shape[0],
        group_size=bias.shape[2],
        head_dim=base.shape[3],
        sinks=base.shape[2],
    )


def _check_names(path: Path, layer: int, tensors: Mapping[str, Tensor]) -> None:
    missing, unknown = sorted(set(NAMES) - set(tensors)), sorted(set(tensors) - set(NAMES))
    if missing or unknown:
        raise ConfigError(
            f"gate is {str(path)!r}, layer {layer} is not of the Fast KVzip format: missing "
            f"{missing}, unknown {unknown}"
        )


def _check_layer(path: Path, layer: int, tensors: Mapping[str, Tensor], shape: GateShape) -> None:
    _check_names(path, layer, tensors)
    for name, expected in shape.tensor_shapes().items():
        if tuple(tensors[name].shape) != expected:
            raise ConfigError(
                f"gate is {str(path)!r}, layer {layer} has {name} of shape "
                f"{list(tensors[name].shape)}, it must be {list(expected)}"
            )
