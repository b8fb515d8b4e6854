"""Answers at ρ 0.5 on the embedded model: those of Tangram's own engine with the same profile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engines import EngineOutcome, fork, prompt_of, run, smollm2_profile
from tangram_vllm.refusals import SERVED_SCORERS

LENGTHS = (40, 700, 1015)  # the last one decodes over the end of a chunk
NEW = 24


def ask_engine(folder: Path) -> None:
    """Write the profile of each scorer, and the engine's answers with it."""
    from tangram import LLM, SamplingParams

    for scorer in SERVED_SCORERS:
        smollm2_profile(scorer).save(folder / f"{scorer}.json")
    llm = LLM(
        model="smollm2",
        dtype="float32",
        max_model_len=4096,
        kv_retention=0.5,
        profile=tuple(str(folder / f"{scorer}.json") for scorer in SERVED_SCORERS),
    )
    prompts = [
        {"prompt_token_ids": prompt_of(*one, 40000)} for one in zip(LENGTHS, range(3), strict=True)
    ]
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    for scorer in SERVED_SCORERS:
        answers = llm.generate(prompts, params, kv_scorer=scorer)
        (folder / f"{scorer}.answers").write_text(
            json.dumps([[list(one.token_ids) for one in each.outputs] for each in answers])
        )


@pytest.fixture(scope="module")
def engine_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of `ask_engine`."""
    folder = tmp_path_factory.mktemp("engine")
    done = fork(lambda: ask_engine(folder), {})
    assert done.succeeded, done.log[-3000:]
    return folder


@pytest.mark.parametrize("scorer", SERVED_SCORERS)
def test_answers_are_those_of_the_engine(
    smollm2: dict[str, Any], engine_folder: Path, scorer: str
) -> None:
    requests = [
        {"prompt": prompt_of(length, seed, 40000), "max_tokens": NEW}
        for seed, length in enumerate(LENGTHS)
    ]
    cut = {"max_num_batched_tokens": 600, "enable_prefix_caching": False}
    options = {"profile": str(engine_folder / f"{scorer}.json")}
    ours: EngineOutcome = run({**smollm2, **cut}, [requests], options)
    assert ours.tokens() == json.loads((engine_folder / f"{scorer}.answers").read_text())
