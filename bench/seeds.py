"""Counts seeded answers that differ in batches of one and eight: `python -m bench.seeds`."""

from __future__ import annotations

import json

from tangram import LLM, SamplingParams

TEMPERATURES, TOKENS, AT_ONCE, PROMPTS = (0.7, 1.0, 2.0), 64, 8, 16


def count_different(llm: LLM, temperature: float) -> int:
    """Of 16 prompts of 10 to 400 words, the number of answers that differ in a batch of eight."""
    prompts = [
        f"Story {number}. " + "Once there was a fox. " * (2 + 5 * number)
        for number in range(PROMPTS)
    ]
    params = [
        SamplingParams.state_all(
            temperature=temperature, seed=number, max_tokens=TOKENS, ignore_eos=True
        )
        for number in range(PROMPTS)
    ]
    alone = [
        llm.generate(prompt, one)[0].outputs[0] for prompt, one in zip(prompts, params, strict=True)
    ]
    together = [
        answer.outputs[0]
        for start in range(0, PROMPTS, AT_ONCE)
        for answer in llm.generate(
            prompts[start : start + AT_ONCE], params[start : start + AT_ONCE]
        )
    ]
    return sum(one.token_ids != other.token_ids for one, other in zip(alone, together, strict=True))


def main() -> None:
    llm = LLM("smollm2", kv_retention=1.0, enable_prefix_caching=False)
    different = {temperature: count_different(llm, temperature) for temperature in TEMPERATURES}
    print(json.dumps({"answers": PROMPTS, "tokens": TOKENS, "different": different}))


if __name__ == "__main__":
    main()
