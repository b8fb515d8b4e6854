"""The bound on answers in one piece, which are in memory until they are written."""

from __future__ import annotations

from tangram.errors import RequestError
from tangram.serve.bridge import Job
from tangram.types import SamplingValues

# Each takes up to 1.5 KB until a whole answer is written, as objects and as JSON: 256 MiB in all.
MAX_WHOLE_LOGPROBS = 175_000


def check_answer_size(job: Job, max_model_len: int, defaults: SamplingValues) -> None:
    """Raise `RequestError` (`logprobs`) if a whole answer to `job` could have more than
    `MAX_WHOLE_LOGPROBS`.

    Each token has one, and one for each alternative. If neither the request nor the `defaults` say
    how many tokens, an answer may fill the context.
    """
    alternatives = job.sampling.logprobs
    if job.stream or alternatives is None:
        return
    wanted = defaults.with_stated(job.sampling).max_tokens
    limit = max_model_len if wanted is None else wanted
    tokens = job.sampling.n * sum(
        max(0, min(limit, max_model_len - len(prompt))) for prompt in job.prompts
    )
    asked = tokens * (alternatives + 1)
    if asked > MAX_WHOLE_LOGPROBS:
        # A file of requests, whose jobs have no record, cannot stream.
        way_out = "" if job.record is None else ", or stream the answer"
        raise RequestError(
            f"logprobs asks for up to {asked} log-probabilities ({job.choices} choices, together "
            f"of {tokens} tokens, {alternatives} alternatives beside each), an answer in one piece "
            f"has at most {MAX_WHOLE_LOGPROBS}: ask for fewer choices, tokens or "
            f"alternatives{way_out}",
            "logprobs",
        )
