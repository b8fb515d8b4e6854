"""How exact attention to FP8 entries is by its products: `python -m bench.fp8_products`.

The embedded model reads a text in float32. In each layer its last tokens attend as in decode: all
entries come from the cache, the newest ones, too. They do so in float32 and by each of `VARIANTS`,
with the queries, keys and values of the float32 pass. Then a pass for each variant, whose last
tokens attend so in every layer, says what it does to the next token. Numbers are rounded in
PyTorch, sums are float32: that tensor cores of FP8 sum with fewer bits is not in the figures.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from bench.logbook import LOGBOOK
from bench.render.page import RESULTS
from tangram.compress.library import find_shipped_profiles
from tangram.compress.profile import Profile
from tangram.foreign_files import replace_file
from tangram.kernels.narrow import as_entries, stored_scales
from tangram.model.load import LoadedModel, load_model
from tangram.types import FP8_MAX
from tangram_lab.environment import environment

FILE = "fp8_products.json"
PROFILE = "smollm2.keydiff.model.c512.r0.5.json"  # all of the model have the same scales
E4M3 = torch.float8_e4m3fn
# A weight is at most 1, where E4M3 has half of its range above.
WIDEST = 256.0


@dataclass(frozen=True)
class ProductVariant:
    """What a decode step rounds to which dtype.

    `entries` are keys and values, `weights` those of attention before they are divided by their
    sum. They are multiplied by `weight_range` and rounded.
    """

    title: str
    entries: torch.dtype
    queries: torch.dtype
    weights: torch.dtype
    weight_range: float = 1.0


REFERENCE = ProductVariant("float32", torch.float32, torch.float32, torch.float32)
VARIANTS = {
    "bfloat16": ProductVariant("a bfloat16 cache", torch.bfloat16, torch.bfloat16, torch.bfloat16),
    "fp8": ProductVariant("an FP8 cache, products in float16", E4M3, torch.float16, torch.float16),
    "fp8_queries": ProductVariant("queries in FP8, too", E4M3, E4M3, torch.float16),
    "fp8_all": ProductVariant("queries and weights in FP8", E4M3, E4M3, E4M3),
    "fp8_all_wide": ProductVariant("the same, weights × 256", E4M3, E4M3, E4M3, WIDEST),
}


def round_entries(entries: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values [T, H, D] float32 as a cache of `dtype` holds them; `scales` [H] are FP8's."""
    if dtype is not E4M3:
        return entries.to(dtype).float()
    by = scales[:, None]
    return as_entries(entries / by, dtype).float() * by


def round_queries(queries: Tensor, dtype: torch.dtype) -> Tensor:
    """Queries [N, Q, D] float32 rounded to `dtype`: in FP8 with one scale for each head and row."""
    if dtype is not E4M3:
        return queries.to(dtype).float()
    by = queries.abs().amax(-1, keepdim=True) / FP8_MAX
    by = by.masked_fill(by == 0, 1.0)
    return as_entries(queries / by, dtype).float() * by


def attend_last(
    variant: ProductVariant, q: Tensor, k: Tensor, v: Tensor, scales: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    """Decode attention of the last N of T tokens: output [N, Q, D], weights [Q, N, T], float32.

    q [N, Q, D], k and v [T, H, D] are float32, `scales` [H, 2] those of keys and values. Weights
    are rounded after the row's largest score is subtracted. Their sum is that of unrounded ones,
    as kernels compute it.
    """
    count, tokens, group = len(q), len(k), q.shape[1] // k.shape[1]
    k, v = (
        round_entries(x, scales[:, part], variant.entries).repeat_interleave(group, 1)
        for part, x in enumerate((k, v))
    )
    scores = round_queries(q, variant.queries).transpose(0, 1) @ k.permute(1, 2, 0) * scaling
    later = torch.arange(tokens) > torch.arange(tokens - count, tokens)[:, None]
    scores = scores.masked_fill_(later, -math.inf)
    weights = (scores - scores.amax(-1, keepdim=True)).exp_()
    total = weights.sum(-1, keepdim=True)
    wide = variant.weight_range
    weights = (weights * wide).to(variant.weights).float() / (wide * total)
    return (weights @ v.transpose(0, 1)).transpose(0, 1), weights


class Prompt:
    """An `AttentionContext` of a pass in float32; keeps keys and values [T, H, D] of each layer."""

    decodes_only = False

    def __init__(self) -> None:
        self.entries: list[tuple[Tensor, Tensor]] = []

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """q [T, Q, D], k and v [T, H, D] of one layer → [T, Q, D]."""
        self.entries.append((k, v))
        group = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=options["scaling"]
        )
        return out[0].transpose(0, 1)


@dataclass
class LastTokens:
    """An `AttentionContext` of a pass over the last tokens of a text: they attend by `variant`.

    `past` are the keys and values of the tokens before them, layer by layer; `scales` are
    [L, H, 2]. `errors` and `moved` [Q] of each of `compared`, layer by layer, say how far its
    output and its weights are from those of `variant`.
    """

    variant: ProductVariant
    past: Sequence[tuple[Tensor, Tensor]]
    scales: Tensor
    compared: Sequence[ProductVariant] = ()
    errors: list[list[Tensor]] = field(default_factory=list)
    moved: list[list[Tensor]] = field(default_factory=list)
    decodes_only = False

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """q [N, Q, D], k and v [N, H, D] of one layer → [N, Q, D]."""
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        k, v = (torch.cat(pair) for pair in zip(self.past[layer], (k, v), strict=True))
        known = (q, k, v, self.scales[layer], options["scaling"])
        own, weights = attend_last(self.variant, *known)
        errors, moved = [], []
        for other in self.compared:
            found, spread = attend_last(other, *known)
            errors.append((found - own).norm(dim=(0, 2)) / own.norm(dim=(0, 2)))
            moved.append((spread - weights).abs_().sum(-1).mean(-1) / 2)
        self.errors.append(errors)
        self.moved.append(moved)
        return own


@torch.inference_mode()
def measure(loaded: LoadedModel, tokens: Sequence[int], last_tokens: int) -> dict[str, Any]:
    """The figures of each of `VARIANTS` by its name, for the `last_tokens` of `tokens`.

    For each layer and head, [L][Q]: `error` is the norm of the difference of outputs over that of
    the float32 ones, `moved` the mean share of the attention weight that lies on other tokens. Of
    the next token `kl_nats` is the mean divergence from float32 with its standard error, and
    `agreement` how often the likeliest is the same.
    """
    profile = Profile.load(find_shipped_profiles() / PROFILE)
    scales, prompt = stored_scales(torch.tensor(profile.scales), E4M3), Prompt()
    start = len(tokens) - last_tokens
    _log_probabilities(loaded, tokens[:start], 0, prompt)
    exact = LastTokens(REFERENCE, prompt.entries, scales, tuple(VARIANTS.values()))
    expected = _log_probabilities(loaded, tokens[start:], start, exact)
    found = {}
    for place, (name, variant) in enumerate(VARIANTS.items()):
        context = LastTokens(variant, prompt.entries, scales)
        logs = _log_probabilities(loaded, tokens[start:], start, context)
        divergence = (expected.exp() * (expected - logs)).sum(-1)
        error, moved = (
            [layer[place].tolist() for layer in layers] for layers in (exact.errors, exact.moved)
        )
        found[name] = {
            "title": variant.title,
            "error": _summary(error),
            "moved": _summary(moved),
            "kl_nats": divergence.mean().item(),
            "kl_stderr_nats": (divergence.std() / last_tokens**0.5).item(),
            "agreement": (logs.argmax(-1) == expected.argmax(-1)).float().mean().item(),
            "layers": {"error": error, "moved": moved},
        }
    return found


def _log_probabilities(
    loaded: LoadedModel, tokens: Sequence[int], start: int, context: Prompt | LastTokens
) -> Tensor:
    """Of the next token [N, V], after each of `tokens` from position `start` on."""
    output = loaded.model(
        input_ids=torch.tensor([tokens]),
        position_ids=torch.arange(start, start + len(tokens))[None],
        use_cache=False,
        logits_to_keep=1 if isinstance(context, Prompt) else 0,
        tangram=context,
    )
    return torch.log_softmax(output.logits[0].float(), -1)


def _summary(layers: Sequence[Sequence[float]]) -> dict[str, float]:
    values = [value for heads in layers for value in heads]
    p90 = statistics.quantiles(values, n=10)[-1]
    return {"median": statistics.median(values), "p90": p90, "worst": max(values)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all variants, keep the figures, print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, default=LOGBOOK, help="what the model reads")
    parser.add_argument("--tokens", type=int, default=8192, help="the most of it")
    parser.add_argument("--last", type=int, default=512, help="tokens that attend as in decode")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS, help="folder of the figures")
    options = parser.parse_args(arguments)
    given = list(sys.argv[1:] if arguments is None else arguments)
    where = environment()  # of the sources as they are now, whoever edits them meanwhile
    loaded = load_model("smollm2", device="cpu", dtype="float32")
    tokens = loaded.tokenizer.encode(options.text.read_text(encoding="utf-8"))[: options.tokens]
    found = measure(loaded, tokens, options.last)
    content = {
        "command": shlex.join(["python", "-m", "bench.fp8_products", *given]),
        "environment": where,
        "options": {
            "model": "smollm2",
            "text": options.text.name,
            "tokens": len(tokens),
            "last_tokens": options.last,
            "profile": PROFILE,
        },
        "variants": found,
    }
    with replace_file(options.output / FILE) as file:
        file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    _print(found)


def _print(found: dict[str, Any]) -> None:
    table = Table(title="errors of decode attention, by its products")
    for column in ("", "error: median", "p90", "worst", "weight moved", "KL, nats", "top-1"):
        table.add_column(column, justify="right" if column else "left")
    for one in found.values():
        errors = [f"{100 * one['error'][name]:.2f} %" for name in ("median", "p90", "worst")]
        moved, same = f"{100 * one['moved']['median']:.2f} %", f"{100 * one['agreement']:.1f} %"
        kl = f"{one['kl_nats']:.5f} ± {one['kl_stderr_nats']:.5f}"
        table.add_row(one["title"], *errors, moved, kl, same)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
