"""Train a gate that predicts a slow scorer's scores from hidden states.

Fast KVzip (Kim et al., arXiv 2601.17668). Layers are trained one after the other, independently: a
layer's gate depends on that layer's input alone. The caller (`gate_training/text_training.py`)
runs the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from tangram.compress.scorers import ChunkView, Scorer
from tangram.compress.scorers.base import require
from tangram.compress.scorers.gate import Gate, GateShape, gate_scores
from tangram.compress.select import choose_entries, dynamic_choice
from tangram.config import Scope
from tangram.errors import ConfigError
from tangram.types import Geometry

LOSS = "smooth L1 of log scores"
# Attention below this teaches nothing, and would outweigh all other scores.
LEAST_SCORE = 1e-4
LEAST_PREDICTION = 1e-6

Tracker = Callable[[Sequence[int], str], Iterable[int]]


@dataclass(frozen=True)
class Recipe:
    """How a gate is trained.

    `most_tokens` bounds memory: 2 bytes · layers · hidden size for each token that is kept. AdamW
    runs over `epochs` of batches of `batch_tokens`. Its rate falls from `learning_rate` to 0 along
    a cosine. `head_dim` and `sinks` are d and S of the gate. `seed` seeds every random draw.
    """

    epochs: int = 6
    batch_tokens: int = 256
    learning_rate: float = 3e-3
    weight_decay: float = 0.01
    most_tokens: int = 65_536
    head_dim: int = 16
    sinks: int = 16
    seed: int = 0


@dataclass
class Examples:
    """Training data of a gate: hidden states and scores of tokens from `chunks` chunks of C tokens.

    The tokens are drawn evenly from the chunks. After every chunk has been taken, `hidden[l]` is
    [N, hidden] in bfloat16 and `scores[l]` is [H, N] in float32, for every layer l that was seen.
    Both are in host memory. Raises `ConfigError` if N tokens do not fill a batch of the recipe.
    """

    chunks: int
    chunk_tokens: int
    recipe: Recipe
    hidden: dict[int, Tensor] = field(default_factory=dict)
    scores: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.tokens < self.recipe.batch_tokens:
            raise ConfigError(
                f"the samples give {self.tokens} tokens to train on, a batch takes "
                f"{self.recipe.batch_tokens}: give more samples, or longer ones"
            )
        generator = torch.Generator().manual_seed(self.recipe.seed)
        self._drawn = [
            torch.randperm(self.chunk_tokens, generator=generator)[: self.tokens_per_chunk]
            for _ in range(self.chunks)
        ]

    @property
    def tokens_per_chunk(self) -> int:
        """How many tokens of each chunk are kept."""
        return max(min(self.chunk_tokens, self.recipe.most_tokens // self.chunks), 1)

    @property
    def tokens(self) -> int:
        """N, the tokens that are kept of all chunks together."""
        return self.chunks * self.tokens_per_chunk

    def take(self, number: int, chunk: ChunkView, scores: Tensor, teacher: Scorer) -> None:
        """Keep tokens of chunk `number`, in one layer, with their `scores` [H, C] by `teacher`."""
        hidden = require(chunk.hidden, "hidden", teacher)
        if chunk.layer not in self.hidden:
            # The model runs in inference mode; tensors allocated there cannot be trained on.
            with torch.inference_mode(False):
                self.hidden[chunk.layer] = torch.empty(
                    self.tokens, hidden.shape[1], dtype=torch.bfloat16
                )
                self.scores[chunk.layer] = torch.empty(chunk.kv_heads, self.tokens)
        drawn, begin = self._drawn[number].to(hidden.device), number * self.tokens_per_chunk
        own = slice(begin, begin + self.tokens_per_chunk)
        self.hidden[chunk.layer][own] = hidden[drawn].to("cpu", torch.bfloat16)
        self.scores[chunk.layer][:, own] = scores[:, drawn].to("cpu", torch.float32)


def train_gate(
    examples: Examples,
    geometry: Geometry,
    device: torch.device,
    track: Tracker = lambda layers, _: layers,
) -> Gate:
    """A gate for every layer that `examples` has.

    Other layers (sliding windows) get an untrained gate. The same examples and recipe give the same
    gate on the same device.
    """
    recipe = examples.recipe
    hidden = next(iter(examples.hidden.values())).shape[1]
    shape = GateShape(
        geometry.layers,
        hidden,
        geometry.kv_heads,
        geometry.group_size,
        recipe.head_dim,
        recipe.sinks,
    )
    layers = []
    for layer in track(range(geometry.layers), "Training"):
        generator = torch.Generator().manual_seed(recipe.seed * geometry.layers + layer)
        weights = {
            name: tensor.to(device) for name, tensor in new_weights(shape, generator).items()
        }
        if layer in examples.hidden:
            _train_layer(
                weights, shape, examples.hidden[layer], examples.scores[layer], recipe, generator
            )
        # Rounded as in the file, so that the gate measured now is the one served later.
        layers.append(
            {name: tensor.detach().cpu().half().float() for name, tensor in weights.items()}
        )
    return Gate(shape, tuple(layers))


def new_weights(shape: GateShape, generator: torch.Generator) -> dict[str, Tensor]:
    """The first weights of a layer's gate.

    Sinks that start equal would stay equal, so they are drawn too.
    """
    shapes = shape.tensor_shapes()
    drawn = {
        "q_proj.weight": shape.hidden**-0.5,
        "k_proj.weight": shape.hidden**-0.5,
        "k_base": 0.5,
    }
    weights = {
        name: torch.randn(shapes[name], generator=generator) * scale
        for name, scale in drawn.items()
    }
    weights |= {name: torch.ones(shapes[name]) for name in ("q_norm.weight", "k_norm.weight")}
    return weights | {name: torch.zeros(shapes[name]) for name in ("q_proj.bias", "b")}


def _train_layer(
    weights: Mapping[str, Tensor],
    shape: GateShape,
    hidden: Tensor,
    scores: Tensor,
    recipe: Recipe,
    generator: torch.Generator,
) -> None:
    """Train `weights` in place on `hidden` [N, hidden] and `scores` [H, N]."""
    device = weights["b"].device
    hidden, wanted = hidden.to(device), scores.to(device).clamp_min(LEAST_SCORE).log()
    parameters = [tensor.requires_grad_() for tensor in weights.values()]
    optimizer = torch.optim.AdamW(
        parameters, lr=recipe.learning_rate, weight_decay=recipe.weight_decay
    )
    batches = len(hidden) // recipe.batch_tokens
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, recipe.epochs * batches)
    for batch in _batches(len(hidden), recipe, generator):
        own = batch.to(device)
        predicted = gate_scores(weights, shape, hidden[own]).clamp_min(LEAST_PREDICTION).log()
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(functional.smooth_l1_loss(predicted, wanted[:, own]))
        optimizer.step()
        schedule.step()


def _batches(tokens: int, recipe: Recipe, generator: torch.Generator) -> Iterator[Tensor]:
    """Which tokens form a batch, int64 [batch_tokens] each.

    Tokens that do not fill a batch are left out of this epoch.
    """
    for _ in range(recipe.epochs):
        order = torch.randperm(tokens, generator=generator)
        yield from torch.split(order, recipe.batch_tokens)[: tokens // recipe.batch_tokens]


def overlap(ours: Tensor, theirs: Tensor, retention: float, scope: Scope | None) -> float:
    """The share of the entries kept by `theirs` that `ours` keeps too; scores [L, H, C] of a chunk.

    The best `retention` of all entries stay: of the model, of each layer, or of each head alone
    (`scope` None).
    """
    mine, other = (_keep_best(scores, retention, scope) for scores in (ours, theirs))
    return (mine & other).sum().item() / other.sum().item()


def _keep_best(scores: Tensor, retention: float, scope: Scope | None) -> Tensor:
    """[L, H, C] bool: which entries of `scores` [L, H, C] stay."""
    if scope is not None:
        return dynamic_choice(scores, retention, scope, sinks=0, window=0, start=0)
    heads = scores.flatten(0, 1)
    count = round(retention * heads.shape[1])
    counts = torch.full((len(heads),), count, device=scores.device)
    return choose_entries(heads, counts).reshape(scores.shape)
