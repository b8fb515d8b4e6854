"""Writes the prompts of `tangram eval` for another runtime: token ids, answers, the model's folder.

Equal options give the prompts, and the digests, of `tangram eval`. `--align-tokens` is the largest
chunk of its grid (with one-shot, the context).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tangram.engine.text.codec import TextCodec
from tangram.model.load import load_model
from tangram_lab.accuracy.sample_prompts import (
    Alignment,
    Questions,
    SamplePrompts,
    filler_token,
    parse_suites,
)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--suites", default="ruler,multiturn")
    parser.add_argument("--samples", type=int, default=52)
    parser.add_argument("--context-tokens", type=int, default=4096)
    parser.add_argument("--max-questions", type=int)
    parser.add_argument("--align-tokens", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--locomo", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    loaded = load_model(options.model, device="cpu")
    codec = TextCodec(loaded.tokenizer)
    suites = []
    for suite, tasks in parse_suites(options.suites).items():
        path = options.locomo if suite == "locomo" else None
        asked = Questions(
            suite,
            tasks,
            options.samples,
            options.context_tokens,
            options.seed,
            options.max_questions,
            path,
        )
        prompts = asked.prompts(codec, Alignment(options.align_tokens, filler_token(codec)))
        samples = [write_sample(sample) for sample in prompts.samples]
        suites.append({"suite": suite, "prompts_sha256": prompts.sha256, "samples": samples})
    folder = loaded.model.config.name_or_path
    content = {"model": folder, "eos_token_ids": loaded.eos_token_ids, "suites": suites}
    options.output.write_text(json.dumps(content) + "\n", encoding="utf-8")


def write_sample(sample: SamplePrompts) -> dict[str, Any]:
    """One context as JSON; its questions begin behind `shared_tokens`."""
    questions = [dataclasses.asdict(question) for question in sample.sample.questions]
    return {
        "task": sample.sample.task,
        "shared_tokens": sample.shared_tokens,
        "prompts": sample.prompts,
        "questions": questions,
    }


if __name__ == "__main__":
    main()
