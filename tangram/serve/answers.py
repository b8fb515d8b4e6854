"""The events of one request as its answer: in one piece, or as server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping

from tangram.serve.api_errors import ApiError
from tangram.serve.bridge import EventStream, Job
from tangram.serve.replies import Format, Json, usage_json
from tangram.serve.schema import StreamOptions
from tangram.types import Usage


async def finish(events: EventStream, style: Format, job: Job, head: Json) -> Json:
    """The whole answer; what has not ended when it is given up is aborted."""
    try:
        return head | {"object": style.whole_object} | await _whole(events, style, job)
    finally:
        events.close()


async def _whole(events: EventStream, style: Format, job: Job) -> Json:
    """The choices and the usage of a whole answer."""
    choices = [style.choice(index) for index in range(job.choices)]
    usages: dict[int, Usage] = {}
    async for index, event in events:
        choices[index].add(event)
        usages[index] = event.usage
    # With alternatives of many tokens an answer is large, and making one would stall every stream.
    made = [
        await asyncio.to_thread(style.whole, index, choice) for index, choice in enumerate(choices)
    ]
    return {"choices": made, "usage": _usage(usages, style, job.sampling.n)}


async def frames(
    events: EventStream, head: Json, style: Format, n: int, options: StreamOptions | None
) -> AsyncIterator[str]:
    """The server-sent events of an answer: openings, deltas, the usage if asked for, [DONE]."""
    include_usage = options is not None and options.include_usage
    continuous = options is not None and options.continuous_usage_stats
    usages: dict[int, Usage] = {}
    try:
        async for index, event in events:
            opening = [] if index in usages else style.opening(index)
            usages[index] = event.usage
            delta = style.delta(index, event)
            tail = (
                {"usage": _usage({index: event.usage}, style, 1) if continuous else None}
                if include_usage
                else {}
            )
            for choice in (*opening, delta):
                yield _frame(head | {"choices": [choice]} | tail)
        if include_usage:
            yield _frame(head | {"choices": [], "usage": _usage(usages, style, n)})
    except ApiError as error:
        yield _frame(error.body())
    yield "data: [DONE]\n\n"


def _usage(usages: Mapping[int, Usage], style: Format, n: int) -> Json:
    """The usage of these choices."""
    return usage_json(
        [usages[index] for index in sorted(usages)], n, style.reasoning_tokens(usages)
    )


def _frame(data: Json) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"
