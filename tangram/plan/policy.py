"""Choose a schedule for each step, from measurements on one GPU.

PersistentKV, calibrated adaptive policy. Four numbers describe the load of a step (`StepLoad`). A
policy holds the times of every schedule on calibration traces. For a new step each trace has a vote
that grows with the closeness of its load. The schedule with the smallest weighted loss against the
best of each trace is chosen.

Worked example, two schedules, reach 1 octave, distances along one axis in octaves:

    trace  distance  vote             times µs     loss of each (log of time over best)
    a      0         1                20, 25       0, 0.22
    b      2         exp(-2) = 0.14   90, 80       0.12, 0
    weighted loss: 0.017 and 0.22, so the first is chosen
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from tangram.errors import ConfigError
from tangram.foreign_files import read_text, replace_file
from tangram.plan.cost import CostModel
from tangram.plan.profit import Prefixes
from tangram.types import Float64

if TYPE_CHECKING:  # commands read policies, and do not wait for Numba
    from tangram.plan.schedule import Decoding

FLASHINFER = "flashinfer"  # the other route, beside the names of schedules
RENAMED = {"packing:measured": "packing:thrifty"}  # in files of before 28 November 2026
REACHES = (0.25, 0.5, 1.0, 2.0, 4.0)
NEAR_ENOUGH = 0.005  # losses this close are noise: the schedule that is listed first wins


@dataclass(frozen=True)
class StepLoad:
    """The load of one layer of a decode step, on average over layers.

    `cells`: rows times KV heads. `mean_tokens`: entries of a cell. `unevenness`: the longest cell
    over the mean, 1 or more. `sharing`: entries that rows read over distinct ones, 1 or more.
    """

    cells: float
    mean_tokens: float
    unevenness: float
    sharing: float

    @classmethod
    def of(cls, batch: Decoding) -> StepLoad:
        """The load of a batch, all layers together."""
        rows, forest = batch.rows, batch.forest
        lengths = batch.lengths[rows.length_index].astype(np.int64)
        mean = float(lengths.mean())
        prefixes = Prefixes.of(forest, lengths, batch.kept_tokens, rows)
        begin = np.where(forest.depth > 0, prefixes.end[forest.parent], 0.0)
        spared = float(((forest.rows - 1) * (prefixes.end - begin)).sum())
        read = mean * len(lengths)
        longest = float(lengths.max(axis=(0, 2)).mean())
        return cls(
            lengths.shape[0] * lengths.shape[2],
            mean,
            longest / max(mean, 1.0),
            read / max(read - spared, 1.0),
        )

    @property
    def place(self) -> Float64:
        """[4]: the numbers in octaves."""
        return np.log2(
            np.maximum([self.cells, self.mean_tokens, self.unevenness, self.sharing], 1.0)
        )


def policy_name(device: str, *, kv_heads: int, group: int, head_dim: int, dtype: str) -> str:
    """The file name of a policy: device, heads, head dim and dtype."""
    return re.sub(
        r"[^\w.-]+", "_", f"{device} {kv_heads * group}-{kv_heads}x{head_dim} {dtype}.json"
    )


@dataclass(frozen=True)
class Policy:
    """Measurements and the choice that follows from them; build it with `fit`.

    `device` and `geometry` say where it is valid. `step_us` has a row for each load and a column
    for each schedule: device time, and planning time where a schedule plans at every step. `reach`
    is the scale, in octaves, on which a trace's vote falls with distance.
    """

    device: str
    geometry: dict[str, Any]
    cost: CostModel
    schedules: tuple[str, ...]
    loads: tuple[StepLoad, ...]
    step_us: tuple[tuple[float, ...], ...]
    reach: float

    @classmethod
    def fit(
        cls,
        device: str,
        geometry: dict[str, Any],
        cost: CostModel,
        schedules: Sequence[str],
        loads: Sequence[StepLoad],
        step_us: Sequence[Sequence[float]],
    ) -> Policy:
        """A policy with the reach of least loss when each trace is decided by the others alone.

        Raises `ConfigError` if there are fewer than two traces, or times are missing.
        """
        if (
            len(loads) < 2
            or any(len(times) != len(schedules) for times in step_us)
            or len(step_us) != len(loads)
        ):
            raise ConfigError(
                f"a policy needs at least two traces, each with times of {len(schedules)} schedules"
            )
        times = tuple(tuple(row) for row in step_us)
        tried = [
            cls(device, geometry, cost, tuple(schedules), tuple(loads), times, reach)
            for reach in REACHES
        ]
        return min(tried, key=Policy._loss_left_out)

    @cached_property
    def _places(self) -> Float64:
        return np.stack([load.place for load in self.loads])

    @cached_property
    def _losses(self) -> Float64:
        """[N, S]: log of each time over the best of its trace."""
        times = np.log(np.asarray(self.step_us))
        return np.asarray(times - times.min(axis=1, keepdims=True))

    def _votes(self, place: Float64) -> Float64:
        """[N]: the votes; never all zero, however far the step is from the traces."""
        distance = ((self._places - place) ** 2).sum(axis=1) / (2 * self.reach**2)
        return np.asarray(np.exp(distance.min() - distance))

    def _loss_left_out(self) -> float:
        total = 0.0
        for number, place in enumerate(self._places):
            votes = self._votes(place)
            votes[number] = 0.0
            total += self._losses[number, _least(votes @ self._losses / max(votes.sum(), 1e-300))]
        return total

    def choose(self, load: StepLoad, *, library: bool) -> str:
        """The schedule to take. `FLASHINFER` is possible only if `library` is true."""
        votes = self._votes(load.place)
        loss = votes @ self._losses / votes.sum()
        if not library and FLASHINFER in self.schedules:
            loss[self.schedules.index(FLASHINFER)] = np.inf
        return self.schedules[_least(loss)]

    def check(self, device: str, geometry: dict[str, Any]) -> None:
        """Raise `ConfigError` naming the mismatch unless the times fit device and geometry."""
        wanted = {"device": device} | geometry
        found = {"device": self.device} | self.geometry
        for name, value in wanted.items():
            if found.get(name) != value:
                raise ConfigError(
                    f"decode_policy is for {name} {found.get(name)}, this is {value}: calibrate "
                    "one for it"
                )

    def save(self, path: Path) -> None:
        """Write all fields as JSON, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(path) as file:
            file.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Policy:
        """Read the file of `save`. Raises `ConfigError` naming what is missing or wrong."""
        try:
            found = TypeAdapter(cls).validate_json(read_text(path))
            return replace(found, schedules=tuple(map(_rename, found.schedules)))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"policy {path}: cannot be read: {error}") from error
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ConfigError(
                f"policy {path}: {where}: {first['msg']}; calibrate it again"
            ) from error


def _rename(schedule: str) -> str:
    """The present name of a schedule; numbers and options stay."""
    kind, plus, options = schedule.partition("+")
    return RENAMED.get(kind, kind) + plus + options


def _least(loss: Float64) -> int:
    return int(np.argmax(loss <= loss.min() + NEAR_ENOUGH))
