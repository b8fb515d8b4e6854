"""What a replica reports to the router, as Ray Serve carries it: a dictionary of plain values."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from tangram.metrics import EngineStats
from tangram.routing.digest import KeyDigest
from tangram.routing.replica_choice import ReplicaReport

# A digest has no more keys: 8 million tokens in chunks of 512, and 128 KiB of a report.
MOST_KEYS = 2**14
# So long an idle replica repeats a report: a third of the age at which the router drops it.
REPEATED_S = 20.0


def make_routing_stats(
    held: Sequence[bytes], pending_chunks: int, stats: EngineStats
) -> Mapping[str, Any]:
    """The report of an engine that holds the chunks of the keys `held`, those used last first.

    `pending_chunks` of prompts are taken in and not computed.
    """
    return {
        "digest": KeyDigest.of(held, MOST_KEYS).to_bytes(),
        "free_pages": stats.pages_free,
        "total_pages": stats.pages_total,
        "queued": stats.waiting,
        "running": stats.running,
        "pending_chunks": pending_chunks,
        "made_s": time.time(),  # the clock that machines share best
    }


def repeat_or_renew(told: Mapping[str, Any], made: Mapping[str, Any]) -> Mapping[str, Any]:
    """The report `told` again while `made` says the same, for `REPEATED_S` at most; else `made`.

    If one report has changed, Ray sends all of them to each router.
    """
    if not told or made["made_s"] - told["made_s"] > REPEATED_S:
        return made
    return told if {**made, "made_s": told["made_s"]} == told else made


def read_routing_stats(
    stats: Mapping[str, Any], known_s: float | None = None
) -> tuple[float, ReplicaReport] | None:
    """The report, and when it was made, in seconds of `time.time`.

    None before the first, and for the one that was made at `known_s`. It is not decoded again: a
    full digest takes milliseconds.
    """
    if not stats or stats["made_s"] == known_s:
        return None
    made_s, values = stats["made_s"], dict(stats)
    del values["made_s"]
    values["digest"] = KeyDigest.from_bytes(values["digest"])
    return made_s, ReplicaReport(**values, age_s=max(0.0, time.time() - made_s))
