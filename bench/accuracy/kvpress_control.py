"""The control: the same model, prompts and ρ through kvpress, the library that these methods were
published with.

kvpress 0.5.5 wants Transformers < 5.3, so it runs in an environment of its own, and this file
imports nothing of ours:

    python -m venv /tmp/kvpress && /tmp/kvpress/bin/pip install torch==2.13.0
    /tmp/kvpress/bin/pip install --no-deps kvpress==0.5.5 peft
    /tmp/kvpress/bin/pip install "transformers<5.3" accelerate datasets "pandas<3" \\
        "cachetools<6" "fire<0.7" requests
    # in Tangram's environment
    python -m bench.accuracy.kvpress_prompts smollm2 --align-tokens 4096 -o prompts.json
    /tmp/kvpress/bin/python bench/accuracy/kvpress_control.py prompts.json \
        --retentions 0.7,0.5,0.3 -o control.json
    # in Tangram's environment
    python -m bench.accuracy.keep results.json --control control.json

Each press sees the context up to where the questions part, once, and then each question; replies
are greedy, by the pipeline of kvpress. The file is written anew after each press, ρ and suite; what
it has already is not run again.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
import time
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import torch
from kvpress import (
    AdaKVPress,
    ExpectedAttentionPress,
    KeyDiffPress,
    KVPressTextGenerationPipeline,
    KVzipPress,
    SnapKVPress,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

# Presses by the name of the scorer that Tangram has of the same method. KVzip lets all heads of the
# model compete, Ada-KV those of a layer. "full" keeps everything; Tangram's ε in Expected Attention
# is 0.01, kvpress's 0.
PRESSES = {
    "full": lambda ratio: None,
    "snapkv": lambda ratio: AdaKVPress(SnapKVPress(compression_ratio=ratio)),
    "expected_attention": lambda ratio: AdaKVPress(ExpectedAttentionPress(compression_ratio=ratio)),
    "expected_attention_epsilon": lambda ratio: AdaKVPress(
        ExpectedAttentionPress(compression_ratio=ratio, epsilon=0.01)
    ),
    "keydiff": lambda ratio: AdaKVPress(KeyDiffPress(compression_ratio=ratio)),
    "kvzip": lambda ratio: KVzipPress(compression_ratio=ratio),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--presses", default=",".join(PRESSES), help=", ".join(PRESSES))
    parser.add_argument("--retentions", default="0.7,0.5,0.3")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    asked = json.loads(options.prompts.read_text(encoding="utf-8"))
    kept = (
        json.loads(options.output.read_text(encoding="utf-8"))["cells"]
        if options.output.exists()
        else []
    )
    pipeline = load_pipeline(asked, options.device)
    retentions = [float(word) for word in options.retentions.split(",")]
    runs = [
        (name, 1.0 if name == "full" else each)
        for name in options.presses.split(",")
        for each in retentions
    ]
    for (name, retention), suite in product(dict.fromkeys(runs), asked["suites"]):
        key = {"scorer": name, "kv_retention": retention, "prompts_sha256": suite["prompts_sha256"]}
        if any(key.items() <= cell.items() for cell in kept):
            continue
        print(f"{name}, ρ {retention:g}: {suite['suite']}", file=sys.stderr)
        begin = time.perf_counter()
        samples = [
            answer_sample(pipeline, PRESSES[name](1 - retention), sample)
            for sample in suite["samples"]
        ]
        kept.append(
            {
                **key,
                "suite": suite["suite"],
                "seconds": time.perf_counter() - begin,
                "samples": samples,
            }
        )
        content = {
            "command": shlex.join(["python", *sys.argv]),
            "environment": environment(options.device),
            "cells": kept,
        }
        options.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def load_pipeline(asked: dict[str, Any], device: str) -> KVPressTextGenerationPipeline:
    """The model of the prompts, in the dtypes in which Tangram loads the embedded one."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(
        asked["model"], dtype=dtype, attn_implementation="sdpa", trust_remote_code=False
    ).to(device)
    model.generation_config.eos_token_id = asked["eos_token_ids"]
    tokenizer = AutoTokenizer.from_pretrained(asked["model"], trust_remote_code=False)
    return KVPressTextGenerationPipeline(model=model.eval(), tokenizer=tokenizer)


def answer_sample(
    pipeline: KVPressTextGenerationPipeline, press: Any, sample: dict[str, Any]
) -> dict[str, Any]:
    """The sample's replies beside its questions."""
    context = sample["shared_tokens"]
    tokens = {
        "context_ids": torch.tensor([sample["prompts"][0][:context]]),
        "questions_ids": [torch.tensor([prompt[context:]]) for prompt in sample["prompts"]],
    }
    longest = max(question["max_tokens"] for question in sample["questions"])
    with torch.inference_mode():
        replies = pipeline._forward(tokens, max_new_tokens=longest, press=press)
    return {"task": sample["task"], "questions": sample["questions"], "replies": replies}


def environment(device: str) -> dict[str, str]:
    """What it ran on."""
    where = (
        torch.cuda.get_device_name()
        if device.startswith("cuda")
        else platform.processor() or platform.machine()
    )
    return {
        "device": where,
        "python": platform.python_version(),
        **{name: version(name) for name in ("kvpress", "torch", "transformers")},
    }


if __name__ == "__main__":
    main()
