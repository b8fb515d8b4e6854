"""What the choice of an integer cache's scales costs: `python -m bench.accuracy.integer_scales`.

Reads passages at ρ 1.0, where nothing but rounding differs from the full cache. Scales are that
multiple of a profile's that is served, the one that fills the range best at the same magnitudes,
and the magnitudes of the same calibration themselves, which fill it wholly.
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

from bench.accuracy.entries import _alignment, _config, _read
from bench.render.page import RESULTS
from tangram.calibrate.measure import Magnitudes
from tangram.calibrate.texts import QUICK_SAMPLES, make_texts
from tangram.compress.scorers import make_scorer
from tangram.config import EngineConfig
from tangram.engine.observe import score_source
from tangram.engine.text import TextCodec
from tangram.foreign_files import replace_file
from tangram.kernels import narrow, torch_kernels
from tangram.lab.accuracy.fidelity import compute_expected
from tangram.lab.accuracy.passages import RealText
from tangram.lab.accuracy.quick import TEXT
from tangram.lab.environment import environment
from tangram.model.load import LoadedModel, load_model
from tangram.types import FP8_MAX

FILE = "accuracy_integer_scales.json"
CHARACTERS = 3600  # of a text, as in `bench.ship_scales`
Rule = Callable[[Tensor, torch.dtype], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=TEXT.samples, help="passages")
    parser.add_argument("--context-tokens", type=int, default=TEXT.context_tokens)
    parser.add_argument("-o", "--output", type=Path, default=RESULTS / FILE)
    options = parser.parse_args()
    loaded, cells = load_model(EngineConfig.model), list[dict[str, Any]]()
    text = RealText(options.samples, options.context_tokens)
    texts = text.prompts(TextCodec(loaded.tokenizer), _alignment(loaded)).pieces
    with TemporaryDirectory() as folder:
        config = _config("int8", 1.0, Path(folder))
        plain = list(compute_expected(_config("as computed", 1.0, Path(folder)), loaded, texts))
        for name, rule in _rules(loaded).items():
            with patch.object(torch_kernels, "stored_scales", rule):
                found = _read(config, loaded, texts, plain)
            cells.append({"scales": name} | {key: one.model_dump() for key, one in found.items()})
            print(name, {key: one.mean for key, one in found.items()}, flush=True)
    content = {
        "command": " ".join(["python -m bench.accuracy.integer_scales", *sys.argv[1:]]),
        "environment": environment(),
        "cells": cells,
    }
    with replace_file(options.output) as file:
        file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def _rules(loaded: LoadedModel) -> Mapping[str, Rule]:
    """Each choice of scales by its name, as it replaces `stored_scales`."""
    largest = _measure_magnitudes(loaded)
    return {
        "powers of two": narrow.stored_scales,
        "448/127 of a profile's": lambda scales, dtype: scales * (FP8_MAX / narrow.INT8_MAX),
        "largest magnitudes / 127": lambda scales, dtype: largest / narrow.INT8_MAX,
    }


def _measure_magnitudes(loaded: LoadedModel) -> Tensor:
    """The largest magnitudes [L, H, 2] that calibration sees."""
    found = Magnitudes()
    tokens = EngineConfig.chunk_tokens
    scores = score_source(loaded, make_scorer("keydiff"), chunk_tokens=tokens, magnitudes=found)
    for text in make_texts(QUICK_SAMPLES, min_characters=CHARACTERS):
        for _ in scores(loaded.tokenizer.encode(text)):
            pass
    if found.largest is None:
        raise SystemExit("no text fills a chunk")
    return found.largest.float()


if __name__ == "__main__":
    main()
