"""What the choice of an integer cache's scales costs: `python -m bench.accuracy.integer_scales`.

Reads passages at ρ 1.0, where nothing but rounding differs from the full cache. The scales are
powers of two, with which products are exact; the largest magnitudes by 127, if the power of two of
an FP8 cache is all that is known of them; the largest magnitudes themselves by 127, as served.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from bench.accuracy.entries import chunk_alignment, compare_logits, config_of_cell
from bench.render.page import RESULTS
from tangram.config import EngineConfig
from tangram.engine.passes import runner
from tangram.engine.text.codec import TextCodec
from tangram.foreign_files import replace_file
from tangram.kernels import narrow
from tangram.kernels.narrow import stored_scales
from tangram.model.load import load_model
from tangram.types import FP8_MAX
from tangram_lab.accuracy.fidelity import compute_expected
from tangram_lab.accuracy.passages import RealText
from tangram_lab.accuracy.quick import TEXT
from tangram_lab.environment import environment

FILE = "accuracy_integer_scales.json"
Rule = Callable[[Tensor, torch.dtype], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--samples", type=int, default=TEXT.samples, help="passages")
    parser.add_argument("--context-tokens", type=int, default=TEXT.context_tokens)
    parser.add_argument("-o", "--output", type=Path, default=RESULTS / FILE)
    options = parser.parse_args()
    loaded, cells = load_model(EngineConfig.model, dtype=options.dtype), list[dict[str, Any]]()
    text = RealText(options.samples, options.context_tokens)
    texts = text.prompts(TextCodec(loaded.tokenizer), chunk_alignment(loaded)).pieces
    with TemporaryDirectory() as folder:
        plain = list(
            compute_expected(config_of_cell("as computed", 1.0, Path(folder)), loaded, texts)
        )
        for name, (entries, rule) in _rules().items():
            config = config_of_cell(entries, 1.0, Path(folder))
            with patch.object(runner, "stored_scales", rule):
                found = compare_logits(config, loaded, texts, plain)
            cells.append({"scales": name} | {key: one.model_dump() for key, one in found.items()})
            print(name, {key: one.mean for key, one in found.items()}, flush=True)
    content = {
        "command": " ".join(["python -m bench.accuracy.integer_scales", *sys.argv[1:]]),
        "environment": environment(),
        "cells": cells,
    }
    with replace_file(options.output) as file:
        file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def _rules() -> Mapping[str, tuple[str, Rule]]:
    """Each choice by its name: the dtype of the cache, and what replaces `stored_scales`."""
    wider = FP8_MAX / narrow.INT8_MAX
    return {
        "fp8": ("fp8, calibrated scales", stored_scales),
        "int8, powers of two": ("int8", lambda scales, dtype: 4 * _powers(scales)),
        "int8, from powers of two": ("int8", lambda scales, dtype: wider * _powers(scales)),
        "int8, from magnitudes": ("int8", stored_scales),
    }


def _powers(scales: Tensor) -> Tensor:
    return stored_scales(scales, torch.float8_e4m3fn)


if __name__ == "__main__":
    main()
