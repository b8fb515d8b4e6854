"""The bound on answers in one piece, which are in memory until they are written."""

from __future__ import annotations

from tangram.errors import RequestError
from tangram.serve.record import Generation
from tangram.types import SamplingValues

# Each takes up to 1.5 KB until a whole answer is written, as objects and as JSON: 256 MiB in all.
MAX_WHOLE_LOGPROBS = 175_000


def check_answer_size(
    generation: Generation, max_model_len: int, defaults: SamplingValues, *, may_stream: bool
) -> None:
    """Raise `RequestError` (`logprobs`) if a whole answer could have more than
    `MAX_WHOLE_LOGPROBS`.

    Each token has one, and one for each alternative. If neither the request nor the `defaults` say
    how many tokens, an answer may fill the context. A file of requests may not stream.
    """
    sampling, choices = generation.first.sampling, generation.choices
    alternatives = sampling.logprobs
    if generation.stream or alternatives is None:
        return
    wanted = defaults.with_stated(sampling).max_tokens
    limit = max_model_len if wanted is None else wanted
    prompts = [len(request.prompt_token_ids) for request in generation.requests]
    tokens = sampling.n * sum(max(0, min(limit, max_model_len - prompt)) for prompt in prompts)
    asked = tokens * (alternatives + 1)
    if asked > MAX_WHOLE_LOGPROBS:
        way_out = ", or stream the answer" if may_stream else ""
        raise RequestError(
            f"logprobs asks for up to {asked} log-probabilities ({choices} choices, together "
            f"of {tokens} tokens, {alternatives} alternatives beside each), an answer in one piece "
            f"has at most {MAX_WHOLE_LOGPROBS}: ask for fewer choices, tokens or "
            f"alternatives{way_out}",
            "logprobs",
        )
