"""What an engine needs for its work, as the simulation of a fleet reckons it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tangram.errors import ConfigError
from tangram.foreign_files import read_text

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=1)]


class EngineCosts(BaseModel):
    """The costs of one engine, measured.

    A step computes up to `step_tokens` of prompts, `prefill_tokens_per_s`, and a token of each
    running sequence. `decode_step_ms` has pairs of a batch and the time of its step; between them
    it is interpolated, and beyond the last two extrapolated. At most `max_num_seqs` sequences run.
    The prefix cache holds `cached_chunks`.

    The defaults are those of the shape of Qwen3-4B in bfloat16 at ρ 0.25 on one H200, as it was on
    2026-11-22 to 24, with contexts of 16,384 tokens where 40 and 96 run. They are kept so that
    fleets compare over time; `serving-8_tangram-0.25.json` has 69,300 tokens of prefill a second
    and 10.4 ms for 40.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    prefill_tokens_per_s: _Positive = 55_000.0
    step_tokens: _Count = 8_448
    decode_step_ms: list[tuple[_Count, _Positive]] = Field(
        default=[(1, 3.9), (8, 4.4), (40, 10.5), (96, 19.8)], min_length=2
    )
    max_num_seqs: _Count = 256
    cached_chunks: _Count = 6_518

    @classmethod
    def read(cls, path: Path) -> EngineCosts:
        """The costs in a JSON file. Raises `ConfigError` that names what is wrong in it."""
        try:
            costs = cls.model_validate_json(read_text(path))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise ConfigError(f"costs {path}: {place}: {first['msg']}") from error
        except (OSError, ValueError) as error:
            raise ConfigError(f"costs {path}: cannot be read: {error}") from error
        batches = [batch for batch, _ in costs.decode_step_ms]
        if any(first >= second for first, second in pairwise(batches)):
            raise ConfigError(f"costs {path}: decode_step_ms has batches {batches}: let them rise")
        return costs

    def prefill_s(self, tokens: int) -> float:
        """Seconds to compute `tokens` of prompts."""
        return tokens / self.prefill_tokens_per_s

    def decode_s(self, batch: int) -> float:
        """Seconds that a step takes for `batch` sequences that decode."""
        if not batch:
            return 0.0
        pairs = list(pairwise(self.decode_step_ms))
        (low, low_ms), (high, high_ms) = next(
            (pair for pair in pairs if batch <= pair[1][0]), pairs[-1]
        )
        share = max(0.0, (batch - low) / (high - low))
        return (low_ms + share * (high_ms - low_ms)) / 1e3
