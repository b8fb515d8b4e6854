"""The requests that reach a fleet: a Mooncake trace, or several copies of it at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tangram.errors import ConfigError
from tangram_lab.load.asks import TRACE_BLOCK, read_lines

# Copies begin within this time of each other, so that they do not send at the same moments.
SPREAD_S = 60.0


@dataclass(frozen=True)
class Arrival:
    """A request at `at_s`: the keys of the chunks that a cache may have, and its tokens."""

    at_s: float
    chain: tuple[bytes, ...]
    prompt_tokens: int
    output_tokens: int


def read_arrivals(path: Path, *, seconds: float, copies: int) -> list[Arrival]:
    """The first `seconds` of the trace `path`, `copies` times at once, in the order of time.

    Copies share what all requests of the trace begin with, and nothing else. A key has 8 bytes.
    Raises `ConfigError` if a line is wrong, or no request is left.
    """
    lines = [line for _, line in read_lines(path) if line.timestamp / 1e3 < seconds]
    if not lines:
        raise ConfigError(f"{path}: no request in the first {seconds} s: raise --seconds")
    common = set(lines[0].hash_ids).intersection(*(line.hash_ids for line in lines))
    arrivals = []
    for copy in range(copies):
        for line in lines:
            # At least one token of a prompt is computed.
            whole = line.hash_ids[: (line.input_length - 1) // TRACE_BLOCK]
            chain = tuple(
                (block if block in common else copy << 32 | block).to_bytes(8, "big")
                for block in whole
            )
            at_s = line.timestamp / 1e3 + SPREAD_S * copy / copies
            arrivals.append(Arrival(at_s, chain, line.input_length, max(1, line.output_length)))
    arrivals.sort(key=lambda arrival: arrival.at_s)
    return arrivals


def count_ideal_hits(arrivals: list[Arrival]) -> int:
    """The chunks that one infinite cache would find, had it computed each request at once."""
    seen, hits = set[bytes](), 0
    for arrival in arrivals:
        found = next(
            (count for count, key in enumerate(arrival.chain) if key not in seen),
            len(arrival.chain),
        )
        hits += found
        seen.update(arrival.chain)
    return hits
