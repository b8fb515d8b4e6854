"""The bound on answers in one piece, which are in memory until they are written."""

from __future__ import annotations

from tangram.errors import RequestError
from tangram.serve.observability.record import Generation
from tangram.types import SamplingValues

# Each takes up to 1.5 KB until a whole answer is written, as objects and as JSON: 256 MiB in all.
MAX_WHOLE_LOGPROBS = 175_000


def check_answer_size(
    generation: Generation, max_model_len: int, defaults: SamplingValues, *, may_stream: bool
) -> None:
    """Raise `RequestError` if an answer could have more log-probabilities than
    `MAX_WHOLE_LOGPROBS`.

    Each token has one, and one for each alternative. If neither the request nor the `defaults` say
    how many tokens, an answer may fill the context. Of a stream only those of the prompts count,
    which come in one piece. A file of requests may not stream.
    """
    sampling, n = generation.first.sampling, generation.first.sampling.n
    prompts = [len(request.prompt_token_ids) for request in generation.requests]
    wanted = defaults.with_stated(sampling).max_tokens
    limit = max_model_len if wanted is None else wanted
    tokens = n * sum(max(0, min(limit, max_model_len - prompt)) for prompt in prompts)
    answered = 0 if generation.stream else _count(tokens, sampling.logprobs)
    prompted = _count(n * sum(prompts), sampling.prompt_logprobs)
    if (asked := answered + prompted) > MAX_WHOLE_LOGPROBS:
        streams = may_stream and prompted <= MAX_WHOLE_LOGPROBS
        raise RequestError(
            lambda field: (
                f"{field} asks for up to {asked} log-probabilities ({generation.choices} choices, "
                f"together of {tokens} tokens; {prompted} are of prompts), an answer in one piece "
                f"has at most {MAX_WHOLE_LOGPROBS}: ask for fewer choices, tokens or "
                f"alternatives{', or stream the answer' if streams else ''}"
            ),
            "logprobs" if answered else "prompt_logprobs",
        )


def _count(tokens: int, alternatives: int | None) -> int:
    return 0 if alternatives is None else tokens * (alternatives + 1)
