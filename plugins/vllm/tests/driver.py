"""One engine of vLLM, in a process forked from one that has imported it.

A job has the `engine`'s arguments and `rounds` of requests. Those of a round are sent together. A
request has a `prompt` of token ids and `max_tokens`; it may have `n`, a `regex`, `abort_after`
so many tokens, and `leads`: how far each token's log-probability lies above the next one's.
"""

from __future__ import annotations

from typing import Any

from vllm import LLM, SamplingParams
from vllm.logprobs import Logprob
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams


def sampling(request: dict[str, Any]) -> SamplingParams:
    regex, n = request.get("regex"), request.get("n", 1)
    return SamplingParams(
        n=n,
        temperature=0 if n == 1 else 1.0,
        output_kind=RequestOutputKind.CUMULATIVE if n == 1 else RequestOutputKind.FINAL_ONLY,
        max_tokens=request["max_tokens"],
        logprobs=2 if request.get("leads") else None,
        ignore_eos=regex is None,
        structured_outputs=None if regex is None else StructuredOutputsParams(regex=regex),
    )


def run_round(llm: LLM, requests: list[dict[str, Any]], number: int) -> list[dict[str, Any]]:
    engine = llm.llm_engine
    for place, request in enumerate(requests):
        prompt = {"prompt_token_ids": request["prompt"]}
        engine.add_request(f"{number}-{place}", prompt, sampling(request))
    answers: list[dict[str, Any]] = [{"tokens": []} for _ in requests]
    while engine.has_unfinished_requests():
        for output in engine.step():
            place = int(output.request_id.split("-")[1])
            found, most = answers[place], requests[place].get("abort_after")
            found["tokens"] = [list(each.token_ids) for each in output.outputs]
            found["texts"] = [each.text for each in output.outputs]
            found["leads"] = [lead(step) for step in output.outputs[0].logprobs or ()]
            found["cached"] = output.num_cached_tokens
            if most is not None and len(found["tokens"][0]) >= most and not output.finished:
                engine.abort_request([output.request_id])
    return answers


def lead(step: dict[int, Logprob]) -> float:
    first, second = sorted((found.logprob for found in step.values()), reverse=True)[:2]
    return first - second


def read_counters(llm: LLM) -> dict[str, float]:
    return {
        metric.name: value
        for metric in llm.get_metrics()
        if (value := getattr(metric, "value", None)) is not None
    }


def on_device(plugin: bool) -> dict[str, Any]:
    """The arguments of an engine with or without the plugin, besides those of a CPU's."""
    if current_platform.is_cpu():
        return {}
    # Beside other engines on one card.
    room = {"kv_cache_memory_bytes": 2**30, "gpu_memory_utilization": 0.02}
    return room | ({"attention_backend": "CUSTOM", "async_scheduling": False} if plugin else {})


def start(engine: dict[str, Any]) -> LLM:
    known = {"dtype": "float32", "enforce_eager": True, "disable_log_stats": False}
    return LLM(**known | engine)


def run(job: dict[str, Any]) -> dict[str, Any]:
    llm = start(job["engine"])
    answers = [run_round(llm, requests, at) for at, requests in enumerate(job["rounds"])]
    pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    return {
        "rounds": answers,
        "counters": read_counters(llm),
        "blocks": pool.num_gpu_blocks,
        "free": pool.get_num_free_blocks(),
    }
