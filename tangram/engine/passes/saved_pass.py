"""A failed pass in a file: its rows, and the pages and lengths of their sequences.

A file is one of safetensors: arrays, and a text of JSON. Nothing in it is run.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from tangram.cache.retention import Retention
from tangram.cache.step import Row, RowKind
from tangram.config import EngineConfig
from tangram.engine.passes.device_tables import BlockTables
from tangram.engine.passes.forward_pass import Pass
from tangram.engine.passes.passes import BegunPass
from tangram.errors import ConfigError
from tangram.types import Int32, Int64
from tangram.version import __version__

FORMAT = "tangram pass 1"
_ROW = ("request_id", "slot", "retention", "kind", "start", "preceding", "sample")
MOST_BYTES = 1 << 30  # of a file's pages; the first sequences are kept, whose rows fit
MOST_FILES = 8  # of one folder: an engine that fails at every step fills no disk

_log = logging.getLogger("tangram")


@dataclass(frozen=True, eq=False)
class SavedPass:
    """The `rows` of a pass, whose retentions are numbers of the engine's.

    `tables` int32 [n, width] and `lengths` int32 [n, groups] are those of `slots` [n]. Tables name
    places of `pages` [m, Hp, S, P, D]. `error` says how the pass failed in an engine of `config`.
    """

    config: EngineConfig
    error: str
    rows: tuple[dict[str, Any], ...]
    tokens: list[list[int]]
    slots: Int64
    tables: Int32
    lengths: Int32
    pages: Tensor

    def as_rows(self, retentions: Sequence[Retention]) -> tuple[Row, ...]:
        """The rows of an engine that has these retentions, in its order."""
        return tuple(
            Row(
                row["request_id"],
                row["slot"],
                retentions[row["retention"]],
                RowKind(row["kind"]),
                row["start"],
                np.array(tokens, np.int64),
                np.array(row["preceding"], np.int64),
                row["sample"],
            )
            for row, tokens in zip(self.rows, self.tokens, strict=True)
        )


class PassSaver:
    """Saves the passes that fail in an engine of `config` into `folder`, up to `MOST_FILES`.

    `retentions` are the engine's, in its order; `cache` has the block tables over `pool`.
    """

    def __init__(
        self,
        folder: Path,
        config: EngineConfig,
        retentions: Sequence[Retention],
        cache: BlockTables,
        pool: Tensor,
    ) -> None:
        self._folder, self._config, self._retentions = folder, config, list(retentions)
        self._cache, self._pool = cache, pool

    def logits(self, begun: BegunPass) -> Tensor:
        """The logits of `begun`, for which this waits. It is saved if it raises or one is NaN."""
        work = begun.work
        try:
            logits = begun.logits()
            unsound = logits.isnan().any(dim=1).numpy(force=True)
        except Exception as error:
            self._save(begun, range(len(work.rows)), f"{type(error).__name__}: {error}")
            raise
        if unsound.any():
            rows = np.searchsorted(work.ends, work.sampled[unsound])
            self._save(begun, rows.tolist(), "its logits are NaN")
        return logits

    def _save(self, begun: BegunPass, failed: Iterable[int], error: str) -> None:
        """Save what can be saved. A full disk, or a device that answers no more, is only logged."""
        try:
            self._write(begun, failed, error)
        except (OSError, RuntimeError):
            _log.exception("a pass has failed (%s), and could not be saved", error)

    def _write(self, begun: BegunPass, failed: Iterable[int], error: str) -> None:
        """Save the rows of the sequences of the rows `failed`, as many as `MOST_BYTES` hold."""
        self._folder.mkdir(parents=True, exist_ok=True)
        if len(list(self._folder.glob("pass-*.safetensors"))) >= MOST_FILES:
            return
        work, page_bytes = begun.work, self._pool[0].numel() * self._pool.itemsize
        wanted = np.unique([work.rows[at].slot for at in failed])
        named = np.cumsum([len(np.unique(self._cache.tables[slot])) for slot in wanted])
        slots = wanted[: max(1, int((named * page_bytes <= MOST_BYTES).sum()))]
        tokens = begun.inputs[: len(work.tokens)].tolist()
        kept = [at for at, row in enumerate(work.rows) if row.slot in slots]
        numbers, tables = np.unique(self._cache.tables[slots], return_inverse=True)
        about = {
            "error": error,
            "version": __version__,
            "config": asdict(self._config),
            "rows": [self._describe(work.rows[at]) for at in kept],
            "tokens": [_tokens_of(work, at, tokens) for at in kept],
        }
        arrays = {
            "slots": slots,
            "tables": tables.reshape(len(slots), -1).astype(np.int32),
            "lengths": work.addresses.lengths[slots],
        }
        tensors = {name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in arrays.items()}
        where = torch.from_numpy(numbers.astype(np.int64)).to(self._pool.device)
        tensors["pages"] = self._pool[where].cpu()
        name = f"pass-{time.strftime('%Y%m%d-%H%M%S')}-{time.monotonic_ns()}.safetensors"
        path = self._folder / name
        path.touch(0o600)  # it has what users wrote
        path.write_bytes(save(tensors, {"format": FORMAT, "about": json.dumps(about)}))
        _log.error("a pass has failed: %s; it is in %s", error, path)

    def _describe(self, row: Row) -> dict[str, Any]:
        return {
            "request_id": row.request_id,
            "slot": row.slot,
            "retention": self._retentions.index(row.retention),
            "kind": row.kind.value,
            "start": row.start,
            "preceding": row.preceding.tolist(),
            "sample": row.sample,
        }


def _tokens_of(work: Pass, at: int, tokens: list[int]) -> list[int]:
    end = int(work.ends[at])
    return tokens[end + 1 - len(work.rows[at].tokens) : end + 1]


def load_pass(path: Path) -> SavedPass:
    """The pass in the file `path`. Raises `ConfigError` if it is none, or of another version."""
    try:
        with safe_open(path, framework="pt") as file:
            known = file.metadata() or {}
            if known.get("format") != FORMAT:
                raise ConfigError(f"{path} is no failed pass: its format is not {FORMAT!r}")
            about = json.loads(known["about"])
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if about["version"] != __version__:
            raise ConfigError(
                f"{path} was saved by Tangram {about['version']}, this is {__version__}: replay it "
                "with that version"
            )
        names = {field.name for field in fields(EngineConfig)}
        options = {name: value for name, value in about["config"].items() if name in names}
        pages = arrays.pop("pages")
        return SavedPass(
            EngineConfig(**options),
            str(about["error"]),
            tuple({name: row[name] for name in _ROW} for row in about["rows"]),
            about["tokens"],
            pages=pages,
            **{name: array.numpy() for name, array in arrays.items()},
        )
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} cannot be read as a failed pass: {error}") from error
