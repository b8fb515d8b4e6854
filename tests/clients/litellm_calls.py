"""LiteLLM, and the calls that aider makes through it, as their users write them; one JSON object
comes out.

Runs in the environment that `make clients` makes, which has no Tangram.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm

base_url, name = sys.argv[1:]
model, messages = f"openai/{name}", [{"role": "user", "content": "What is the capital of France?"}]
server = {"api_base": base_url, "api_key": "none", "num_retries": 0, "timeout": 120}
asked: dict[str, Any] = {
    "model": model,
    "messages": messages,
    "temperature": 0,
    "max_tokens": 8,
    **server,
}


def refusal(**fields: Any) -> dict[str, Any]:
    try:
        litellm.completion(**{**asked, **fields})
    except Exception as error:
        return {"kind": type(error).__name__, "message": str(error)}
    return {}


def stream(**fields: Any) -> dict[str, Any]:
    chunks = list(litellm.completion(**{**asked, "stream": True, **fields}))
    whole = litellm.stream_chunk_builder(chunks, messages=messages)
    usage = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)]
    return {
        "text": whole.choices[0].message.content,
        "finish_reason": whole.choices[0].finish_reason,
        "prompt_tokens": usage[-1].prompt_tokens if usage else None,
    }


def aider(*, stream: bool) -> str:
    """Aider-AI/aider, aider/models.py, Model.send_completion: what it hands on for a model
    `openai/NAME`.
    """
    system = [{"role": "system", "content": "Act as an expert software developer."}]
    turns = [*system, *messages, {"role": "assistant", "content": "Ok."}, *messages]
    kwargs = {
        "model": model,
        "stream": stream,
        "temperature": 0,
        "messages": turns,
        "max_tokens": 8,
    }
    answer = litellm.completion(**kwargs, **server)
    if not stream:
        return str(answer.choices[0].message.content)
    return "".join(chunk.choices[0].delta.content or "" for chunk in answer)


whole = litellm.completion(**asked)
print(
    json.dumps(
        {
            "text": whole.choices[0].message.content,
            "usage": whole.usage.model_dump(),
            "streamed": stream(stream_options={"include_usage": True}),
            "labelled": litellm.completion(**asked, user="me", metadata={"trace": "7"})
            .choices[0]
            .finish_reason,
            "aider": [aider(stream=True), aider(stream=False)],
            "effort": refusal(reasoning_effort="low", allowed_openai_params=["reasoning_effort"]),
            "bad_field": refusal(extra_body={"temprature": 1}),
            "bad_model": refusal(model="openai/other"),
        }
    )
)
