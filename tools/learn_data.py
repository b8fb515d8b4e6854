"""What the chapters of /learn show beside their formulas: models, cards, profiles, measurements.

Each value is read from the package or from `bench/results`. Only the cards' figures are typed in:
they are those of NVIDIA's data sheets.
"""

from __future__ import annotations

import ast
import json
from dataclasses import asdict
from functools import cache
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Any

from bench.roofline import (
    RESULTS,
    StepModel,
    decode_point,
    kernel_points,
    measured_ceiling,
    prefill_point,
)
from tangram.compress.profile import Profile
from tangram.model.config_json import read_config
from tangram.plan.cost import CostModel
from tangram.plan.packing import MAX_QUERY_ROWS
from tangram.sizing.kv_shape import presets, read_shape
from tangram.sizing.weight_size import read_weights
from tools.learn_site import PAGE, ROOT

# Eight sizes that the third chapter lists; the calculator has all presets.
LISTED = (
    "llama-3.1-8b",
    "llama-3.1-70b",
    "llama-3.1-405b",
    "qwen3-4b",
    "qwen3-32b",
    "mistral-large-2",
    "deepseek-v3",
    "kimi-k2",
)
PROFILES = (
    "qwen3-4b-instruct-2507.keydiff.model.c512.r0.25",
    "llama-3.1-8b-instruct.keydiff.layer.c512.r0.25",
    "smollm2.keydiff.model.c512.r0.5",
)


def _card(
    name: str,
    capability: tuple[int, int],
    memory_gib: int,
    gb_per_s: int,
    tflops: float,
    kib: int,
    source: str,
) -> dict[str, Any]:
    return {
        "name": name,
        "capability": list(capability),
        "memory_gib": memory_gib,
        "bytes_per_s": gb_per_s * 1e9,
        "flops_per_s": tflops * 1e12,
        "shared_bytes": kib << 10,
        "source": f"NVIDIA, {source}",
    }


# Dense FLOP/s with 16-bit operands and 32-bit sums, and memory as it is sold. Shared memory of a
# block is from the CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
CARDS = (
    _card("A100 80 GB", (8, 0), 80, 2039, 312.0, 163, "A100 80GB data sheet (SXM)"),
    _card("H100 SXM", (9, 0), 80, 3350, 989.4, 227, "H100 GPU architecture white paper (SXM5)"),
    _card("H200", (9, 0), 141, 4800, 989.4, 227, "H200 data sheet (SXM)"),
    _card("B200", (10, 0), 180, 8000, 2250.0, 227, "DGX B200 data sheet, an eighth"),
    _card("L40S", (8, 9), 48, 864, 362.0, 99, "L40S data sheet"),
    _card("L4", (8, 9), 24, 300, 121.0, 99, "L4 data sheet"),
    _card("RTX 3090", (8, 6), 24, 936, 71.0, 99, "Ampere GA102 GPU architecture white paper"),
    _card("RTX 4090", (8, 9), 24, 1008, 165.2, 99, "Ada GPU architecture white paper"),
    _card("RTX 5090", (12, 0), 32, 1792, 209.5, 99, "RTX Blackwell GPU architecture white paper"),
    _card("T4", (7, 5), 16, 320, 65.0, 64, "T4 data sheet (FP16)"),
)


def shipped_profile(name: str) -> Profile:
    """A profile of the package by the name of its file, without the ending."""
    return Profile.load(Path(str(files("tangram.profiles"))) / f"{name}.json")


def data_files() -> dict[str, Any]:
    """The content of each file of learn/data, by its name."""
    return {
        "models.json": _models(),
        "cards.json": {"cards": list(CARDS)},
        "roofline.json": _roofline(),
        "schedules.json": _schedules(),
        "naive.json": _naive(),
        "kernels.json": _kernels(),
        "profiles.json": _profiles(),
        "acceptance.json": _acceptance(),
        "sources.json": _sources(),
    }


def _models() -> dict[str, Any]:
    return {"listed": list(LISTED), "models": [_model(name) for name in presets()]}


def _model(name: str) -> dict[str, Any]:
    config = read_config(name)
    shape = read_shape(config)
    weights = read_weights(config, "bfloat16")
    return {
        "name": name,
        "kv_heads": shape.kv_heads,
        "query_heads": config.count("num_attention_heads", "attention"),
        "head_dim": shape.head_dim,
        "latent": shape.latent,
        "windows": list(shape.windows),
        "parameters": weights.parameters,
        "weight_bytes": weights.bytes,
    }


def _roofline() -> dict[str, Any]:
    names = ("llama-3.1-8b", "llama-3.1-70b", "qwen3-4b", "qwen3-32b")
    return {
        "models": [{"name": name} | vars(StepModel.of(name)) for name in names],
        "machine": {"card": "H100 SXM"} | measured_ceiling("kernels_dense"),
        "kernels": list(kernel_points()),
        "steps": {"card": "H100 SXM", "points": [prefill_point(), decode_point()]},
    }


def _read_result(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return content


def _setting(content: dict[str, Any], name: str) -> dict[str, Any]:
    """Where a figure comes from, for the line beneath it."""
    environment = content["environment"]
    known = ("date", "commit", "cpu", "gpu", "threads", "torch")
    return {
        "source": f"bench/results/{name}.json",
        "command": content["command"],
        **{field: environment[field] for field in known if field in environment},
    }


def _schedules() -> dict[str, Any]:
    """Each step as [seconds, [[request, kind, tokens], …]]."""
    content = _read_result("schedules")
    return _setting(content, "schedules") | {
        "model": content["model"],
        "max_num_seqs": content["options"]["max_num_seqs"],
        "requests": content["requests"],
        "schedules": {
            kind: {
                "seconds": sorted(found["seconds"]),
                "ttft_s": found["summary"]["ttft_s"],
                "tokens_per_s": found["summary"]["tokens_per_s"],
                "steps": [[step["seconds"], step["rows"]] for step in found["steps"]],
            }
            for kind, found in content["schedules"].items()
        },
    }


def _naive() -> dict[str, Any]:
    content = _read_result("naive_decoding")
    fields = ("model", "tokens", "prompt_tokens", "naive", "cached")
    return _setting(content, "naive_decoding") | {field: content[field] for field in fields}


def _kernels() -> dict[str, Any]:
    """The tiles that kernels would like to have; a card's shared memory may make them smaller."""
    from tangram.kernels.triton.gathered import _TILE
    from tangram.kernels.triton.packed import TILES
    from tangram.kernels.triton.prefill import TILE, WIDE_TILE

    return {
        "decode": [asdict(tile) for tile in TILES],
        "prefill": asdict(TILE),
        "prefill_wide": asdict(WIDE_TILE),
        "gathered": asdict(_TILE),
        "cost": asdict(CostModel()),
        "query_rows": MAX_QUERY_ROWS,
    }


def _profiles() -> dict[str, Any]:
    return {"profiles": [_profile(name) for name in PROFILES]}


def _profile(name: str) -> dict[str, Any]:
    found = shipped_profile(name).model_dump(mode="json")
    left_out = ("checksum", "calibration", "format_version", "model", "groups")
    kept = {field: value for field, value in found.items() if field not in left_out}
    return {"name": name, "model": found["model"]["name"]} | kept


def _acceptance() -> dict[str, Any]:
    """By scorer, ρ and number of drafts: how often a draft is accepted where those before it are.

    The median over texts.
    """
    content = _read_result("speculation_acceptance")
    found: dict[tuple[str, float, int], list[float]] = {}
    for cell in content["cells"]:
        key = cell["scorer"], cell["kv_retention"], cell["drafted"]
        found.setdefault(key, []).append(cell["speculation"]["acceptance"])
    rows = [
        {"scorer": key[0], "kv_retention": key[1], "drafted": key[2]}
        | {"share": round(median(shares), 4), "texts": len(shares)}
        for key, shares in sorted(found.items())
    ]
    setting = _setting(content["sessions"][-1], "speculation_acceptance")
    del setting["command"]  # several commands made these figures
    return setting | {"rows": rows}


class _Links(HTMLParser):
    """The `data-source` of all links of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs).get("data-source")
        if named:
            self.found.append(named)


def source_links() -> list[str]:
    """The links into the source, as `path:name`, in the order of the chapters."""
    links = _Links()
    links.feed(PAGE.read_text())
    return links.found


def _sources() -> dict[str, str]:
    return {link: source_of(link) for link in dict.fromkeys(source_links())}


def source_of(link: str) -> str:
    """The text of the function, class or method that `path:name` names, or `LookupError`."""
    path, _, name = link.partition(":")
    text = (ROOT / path).read_text()
    node: Any = _tree(path)
    for part in name.split("."):
        inner = [one for one in node.body if getattr(one, "name", None) == part]
        if not inner:
            raise LookupError(f"{path} has no {name}: change the link in {PAGE.name}")
        node = inner[0]
    first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
    lines = text.splitlines()[first - 1 : node.end_lineno]
    indent = len(lines[0]) - len(lines[0].lstrip())
    return "\n".join(line[indent:] for line in lines)


@cache
def _tree(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text())
