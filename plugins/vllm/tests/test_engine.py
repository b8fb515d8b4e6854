"""Answers at ρ 0.5 on the embedded model: those of Tangram's own engine with the same profile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engines import EngineOutcome, fork, prompt_of, run, smollm2_profile

LENGTHS = (40, 700, 1015)  # the last one decodes over the end of a chunk
NEW = 24


def ask_engine(profile: Path, found: Path) -> None:
    from tangram import LLM, SamplingParams

    llm = LLM(
        model="smollm2",
        dtype="float32",
        max_model_len=4096,
        kv_retention=0.5,
        profile=(str(profile),),
    )
    prompts = [
        {"prompt_token_ids": prompt_of(*one, 40000)} for one in zip(LENGTHS, range(3), strict=True)
    ]
    answers = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True))
    found.write_text(
        json.dumps([[list(one.token_ids) for one in each.outputs] for each in answers])
    )


@pytest.mark.parametrize("scorer", ["keydiff", "streaming_llm", "tova"])
def test_answers_are_those_of_the_engine(
    smollm2: dict[str, Any], tmp_path: Path, scorer: str
) -> None:
    profile, found = tmp_path / "profile.json", tmp_path / "found.json"
    smollm2_profile(scorer).save(profile)
    done = fork(lambda: ask_engine(profile, found), {})
    assert done.succeeded, done.log[-3000:]
    requests = [
        {"prompt": prompt_of(length, seed, 40000), "max_tokens": NEW}
        for seed, length in enumerate(LENGTHS)
    ]
    cut = {"max_num_batched_tokens": 600, "enable_prefix_caching": False}
    ours: EngineOutcome = run({**smollm2, **cut}, [requests], {"profile": str(profile)})
    assert ours.tokens() == json.loads(found.read_text())
