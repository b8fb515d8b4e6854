"""What a card could reach, and what was measured: `python -m bench.roofline`.

A step of a model takes at least as long as its bytes at the card's bandwidth, and as its operations
at its FLOP/s. An operation is a multiplication or an addition. Each weight is read once a step and
takes 2 operations for each token. Each KV entry is read once a sequence and takes 4 operations for
each query head and dimension.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tangram.model.config_json import read_config
from tangram.sizing.cache_size import kv_size
from tangram.sizing.weight_size import read_weights

RESULTS = Path(__file__).parent / "results"
QWEN = Path(__file__).parent / "models" / "qwen3-4b"


@dataclass(frozen=True)
class Ceiling:
    """The two limits of a card: dense 16-bit FLOP/s, and bytes a second of its memory."""

    flops_per_s: float
    bytes_per_s: float

    def attainable(self, intensity: float) -> float:
        """FLOP/s at an arithmetic intensity in FLOP per byte."""
        return min(self.flops_per_s, intensity * self.bytes_per_s)

    def seconds(self, flops: float, read_bytes: float) -> float:
        """The least time of a step."""
        return max(read_bytes / self.bytes_per_s, flops / self.flops_per_s)


@dataclass(frozen=True)
class StepModel:
    """What a step of one model reads and computes; `attention_flops` is for one KV entry."""

    parameters: int
    weight_bytes: int
    kv_token_bytes: int
    attention_flops: int

    @classmethod
    def of(cls, model: str | Path) -> StepModel:
        """From a config.json with grouped-query or multi-head attention, in bfloat16."""
        config = read_config(model)
        weights, size = read_weights(config, "bfloat16"), kv_size(config, 1)
        heads = config.count("num_attention_heads", "attention")
        layers = len(size.shape.windows)
        return cls(
            weights.parameters,
            weights.bytes,
            size.bytes_per_token,
            4 * layers * heads * size.shape.head_dim,
        )

    def decode(self, batch: int, context_tokens: int) -> tuple[int, int]:
        """Operations and bytes of a step in which `batch` sequences get one token each."""
        flops = batch * (2 * self.parameters + context_tokens * self.attention_flops)
        return flops, self.weight_bytes + batch * context_tokens * self.kv_token_bytes

    def prefill(self, tokens: int) -> tuple[int, int]:
        """Operations and bytes of a step that computes a prompt from its start."""
        attention = self.attention_flops * tokens * (tokens + 1) // 2
        flops = 2 * self.parameters * tokens + attention
        return flops, self.weight_bytes + tokens * self.kv_token_bytes


def kernel_points() -> Iterator[dict[str, Any]]:
    """Decode attention alone, the best schedule of each case of the published kernel figures."""
    for name in ("kernels_dense", "kernels_pat"):
        content = json.loads((RESULTS / f"{name}.json").read_text())
        for row in content["rows"]:
            ours = [one for one in row["contenders"] if one["ours"]]
            best = min(ours, key=lambda one: one["median_us"])
            yield {
                "case": row["case"],
                "source": f"bench/results/{name}.json",
                "schedule": best["name"],
                "intensity": row["operations"] / row["unique_bytes"],
                "flops_per_s": row["operations"] / best["median_us"] * 1e6,
            }


def prefill_point() -> dict[str, Any]:
    """64 prompts of 8,192 tokens through a whole model, one output token each."""
    content = json.loads((RESULTS / "ranks-1_tangram-1.json").read_text())
    runs = content["cases"]["prefill"].values()
    model, length = StepModel.of(QWEN), 8192
    flops, read_bytes = model.prefill(length)
    seconds = median(run["seconds"] / run["requests"] for run in runs)
    return {
        "case": f"prefill of {length:,} tokens, shape of Qwen3-4B, ρ 1.0",
        "source": "bench/results/ranks-1_tangram-1.json",
        "intensity": flops / read_bytes,
        "flops_per_s": flops / seconds,
    }


def decode_point() -> dict[str, Any]:
    """64 sequences of 8,192 tokens and half of their 512 output tokens decode together.

    The time is the median of a token's, so prefill beside the decoding sequences counts.
    """
    content = json.loads((RESULTS / "ranks-1_tangram-1.json").read_text())
    runs = content["cases"]["answers-8k"].values()
    batch, context = 64, 8192 + 256
    flops, read_bytes = StepModel.of(QWEN).decode(batch, context)
    seconds = median(run["tpot_ms"]["p50"] / 1e3 for run in runs)
    return {
        "case": f"decode, batch {batch}, {context:,} tokens each, shape of Qwen3-4B, ρ 1.0",
        "source": "bench/results/ranks-1_tangram-1.json",
        "intensity": flops / read_bytes,
        "flops_per_s": flops / seconds,
    }


def measured_ceiling(name: str) -> dict[str, Any]:
    """What a copy and a matrix product reached on the machine of `bench/results/NAME.json`."""
    content = json.loads((RESULTS / f"{name}.json").read_text())
    found = content["ceilings"]
    return {
        "gpu": content["environment"]["gpu"],
        "source": f"bench/results/{name}.json",
        "bytes_per_s": found["copy_bytes_per_us"] * 1e6,
        "flops_per_s": found["operations_per_us"] * 1e6,
    }


def main() -> None:
    for point in (*kernel_points(), prefill_point(), decode_point()):
        print(
            f"{point['intensity']:8.1f} FLOP/byte {point['flops_per_s'] / 1e12:7.1f} TFLOP/s"
            f"  {point['case']}"
        )


if __name__ == "__main__":
    main()
