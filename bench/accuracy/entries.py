"""What rounding KV entries costs, alone and with compression: caches of 8 bits, host memory.

Reads passages like those of `tangram eval --quick` and asks its questions, with the default scorer
and the profiles that ship. Divergences are from the full cache in the model's dtype. With a form of
host memory every sealed chunk is rounded, as if every prefix had come back from there. The file is
rewritten after each cell. The same command continues an interrupted run, and skips what it has.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.render.page import RESULTS
from tangram.compress.library import find_shipped_profiles
from tangram.compress.profile import Profile
from tangram.config import EngineConfig
from tangram.engine.setup.build import engine_of
from tangram.engine.text.codec import TextCodec
from tangram.foreign_files import replace_file
from tangram.model.load import LoadedModel, load_model
from tangram_lab.accuracy.engines import ask_questions
from tangram_lab.accuracy.fidelity import compute_expected, fidelity
from tangram_lab.accuracy.grading import score_reply
from tangram_lab.accuracy.passages import RealText
from tangram_lab.accuracy.quick import NEEDLES as FEW_NEEDLES
from tangram_lab.accuracy.quick import TEXT
from tangram_lab.accuracy.results import Score
from tangram_lab.accuracy.sample_prompts import Alignment, filler_token
from tangram_lab.environment import environment

FILE = "accuracy_entries.json"
NEEDLES = replace(FEW_NEEDLES, samples=8)
RETENTIONS = (1.0, 0.5, 0.25)
# The options of each way to hold entries; the first is the reference.
ENTRIES: Mapping[str, Mapping[str, Any]] = {
    "as computed": {},
    "fp8, scales of 1": {"kv_cache_dtype": "fp8"},
    "fp8, calibrated scales": {"kv_cache_dtype": "fp8"},
    "host memory, fp8": {"kv_offload_dtype": "fp8", "kv_offload_gib": 0.5},
    "host memory, int4": {"kv_offload_dtype": "int4", "kv_offload_gib": 0.5},
    "int8": {"kv_cache_dtype": "int8"},
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--entries", help="comma-separated numbers of ENTRIES, from 0; all")
    parser.add_argument("--retentions", default=",".join(map(str, RETENTIONS)))
    parser.add_argument("--parts", default="text,needles")
    parser.add_argument("--samples", type=int, default=TEXT.samples, help="passages")
    parser.add_argument("--context-tokens", type=int, default=TEXT.context_tokens)
    parser.add_argument("-o", "--output", type=Path, default=RESULTS / FILE)
    options = parser.parse_args(arguments)
    given = list(sys.argv[1:] if arguments is None else arguments)
    names = list(ENTRIES)
    if options.entries:
        names = [names[int(number)] for number in options.entries.split(",")]
    retentions = [float(one) for one in options.retentions.split(",")]
    command = shlex.join(["python", "-m", "bench.accuracy.entries", *given])
    text = RealText(options.samples, options.context_tokens)
    measure(names, retentions, options.parts.split(","), text, options.output, command)


def measure(
    names: Sequence[str],
    retentions: Sequence[float],
    parts: Sequence[str],
    text: RealText,
    path: Path,
    command: str,
) -> None:
    """Measure what `path` lacks."""
    loaded = load_model(EngineConfig.model)
    cells: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    texts = text.prompts(TextCodec(loaded.tokenizer), chunk_alignment(loaded)).pieces
    with TemporaryDirectory() as folder:
        reads = compute_expected(config_of_cell("as computed", 1.0, Path(folder)), loaded, texts)
        plain = list(reads) if "text" in parts else []
        for part, retention, name in product(parts, retentions, names):
            place: dict[str, Any] = {"entries": name, "kv_retention": retention, "part": part}
            if part == "text":
                place["context_tokens"] = text.context_tokens
            if any(place.items() <= cell.items() for cell in cells):
                continue
            begin, config = time.perf_counter(), config_of_cell(name, retention, Path(folder))
            if part == "text":
                found = compare_logits(config, loaded, texts, plain)
            else:
                found = dict(_ask(config, loaded))
            seconds = time.perf_counter() - begin
            cells.append(
                place
                | {key: value.model_dump() for key, value in found.items()}
                | {"seconds": seconds, "command": command, "environment": environment()}
            )
            print(name, retention, {key: one.mean for key, one in found.items()}, flush=True)
            with replace_file(path) as file:
                file.write_text(json.dumps(cells, indent=1, ensure_ascii=False) + "\n")


def config_of_cell(name: str, retention: float, folder: Path) -> EngineConfig:
    """The engine of one cell. Its profile also gives an uncompressed cache its scales."""
    shipped = find_shipped_profiles() / f"smollm2.fastkvzip.model.c512.r{min(retention, 0.5)}.json"
    profile, own = Profile.load(shipped), folder / f"{name}.{retention}.json"
    if name == "fp8, scales of 1":
        profile = profile.with_scales(None)
    profile.save(own)
    return EngineConfig(
        kv_retention=retention,
        profile=(str(own),),
        kv_cache_gib=1.0,
        max_model_len=2048,
        **ENTRIES[name],
    )


def chunk_alignment(loaded: LoadedModel) -> Alignment:
    """Contexts end where chunks do."""
    return Alignment(EngineConfig.chunk_tokens, filler_token(TextCodec(loaded.tokenizer)))


def compare_logits(
    config: EngineConfig, loaded: LoadedModel, texts: Sequence[Sequence[int]], plain: Sequence[Any]
) -> dict[str, Score]:
    """Divergence and so on of a cache on `texts`; `plain` are the logits with full KV."""
    found = [
        fidelity(full, logits, tokens)
        for full, logits, tokens in zip(
            plain, compute_expected(config, loaded, texts), texts, strict=True
        )
    ]
    return {
        "divergence": Score.of([one.divergence for one in found]),
        "agreement": Score.of([one.agreement for one in found]),
        "surprise": Score.of([one.surprise for one in found]),
    }


def _ask(config: EngineConfig, loaded: LoadedModel) -> Iterator[tuple[str, Score]]:
    """The scores of all questions, by sample, and of each task."""
    prompts = NEEDLES.prompts(TextCodec(loaded.tokenizer), chunk_alignment(loaded))
    engine = engine_of(config, loaded)
    answers = ask_questions(engine, prompts.samples, lambda count: None, config.kv_retention)
    scores, by_task = list[float](), dict[str, list[float]]()
    for sample, replies in zip(prompts.samples, answers, strict=True):
        own = [
            score_reply(question, reply.text)
            for question, reply in zip(sample.sample.questions, replies, strict=True)
        ]
        scores.append(sum(own) / len(own))
        by_task.setdefault(sample.sample.task, []).append(scores[-1])
    yield "score", Score.of(scores)
    yield from ((f"ruler/{task}", Score.of(values)) for task, values in by_task.items())


if __name__ == "__main__":
    main()
