"""A failed pass in a file: the value that ran, and the pages of its sequences.

A file is one of safetensors: arrays, among them the pass by msgpack, and a text of JSON. Nothing in
it is run.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec import msgpack, structs
from numpy.lib import format as npy
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from tangram.cache.retention import Retention
from tangram.cache.step import Row
from tangram.config import EngineConfig
from tangram.engine.passes.device_tables import BlockTables
from tangram.engine.passes.forward_pass import Pass, seals_of
from tangram.engine.passes.passes import BegunPass
from tangram.errors import ConfigError
from tangram.kernels.transfer import upload
from tangram.plan.records import ADDRESS, ENTRY, PAST, SEGMENT, SPAN, TASK
from tangram.types import Int32, Int64
from tangram.version import __version__

FORMAT = "tangram pass 3"
MOST_BYTES = 1 << 30  # of a file's pages; the first sequences are kept, whose rows fit
MOST_FILES = 8  # of one folder: an engine that fails at every step fills no disk

# Aligned, as compiled loops expect them: a file of NumPy's does not say so.
_RECORDS = {kind.names: kind for kind in (ADDRESS, PAST, SPAN, ENTRY, TASK, SEGMENT)}

_log = logging.getLogger("tangram")


class SavedRow(Row, frozen=True, eq=False, gc=False):
    """A `Row` whose retention is a number of the engine's."""

    retention: int  # type: ignore[assignment]


@dataclass(frozen=True, eq=False)
class SavedPass:
    """A pass that has failed in an engine of `config`, as `error` says.

    `work` lacks its `rows`. `tables` int32 [n, width] are those of `slots` [n], and name places of
    `pages` [m, Hp, S, P, D]. The last page is zeros: it stands for those that are not in the file.
    Rows of the slots `kept` [k] read none such.
    """

    config: EngineConfig
    error: str
    work: Pass
    rows: tuple[SavedRow, ...]
    slots: Int64
    kept: Int64
    tables: Int32
    pages: Tensor

    def for_engine(self, retentions: Sequence[Retention]) -> Pass:
        """The pass in an engine that has these retentions, in its order."""
        rows = tuple(
            Row(**structs.asdict(row) | {"retention": retentions[row.retention]})
            for row in self.rows
        )
        whole = replace(self.work, rows=rows)
        return replace(whole, seals=seals_of(whole.prefill_rows))


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
            rows = np.searchsorted(work.ends, work.wanted[unsound])
            self._save(begun, rows.tolist(), "its logits are NaN")
        return logits

    def _save(self, begun: BegunPass, failed: Iterable[int], error: str) -> None:
        """Save what can be saved: of a full disk, a device that answers no more or a ratio of one
        request, which another engine lacks, the log tells.
        """
        try:
            self._write(begun, failed, error)
        except (OSError, RuntimeError, ValueError):
            _log.exception("a pass has failed (%s), and could not be saved", error)

    def _write(self, begun: BegunPass, failed: Iterable[int], error: str) -> None:
        """Save the pass, with the pages of the rows `failed`, as many as `MOST_BYTES` hold."""
        self._folder.mkdir(parents=True, exist_ok=True)
        if len(list(self._folder.glob("pass-*.safetensors"))) >= MOST_FILES:
            return
        tables, slot_of = self._cache.tables, np.array([row.slot for row in begun.work.rows])
        slots, wanted = np.unique(slot_of), np.unique(slot_of[list(failed)])
        page_bytes = self._pool[0].numel() * self._pool.itemsize
        named = np.cumsum([len(np.unique(tables[slot])) for slot in wanted])
        kept = wanted[: max(1, int((named * page_bytes <= MOST_BYTES).sum()))]
        numbers = np.unique(tables[kept])
        places = np.full(len(self._pool), len(numbers), np.int32)
        places[numbers] = np.arange(len(numbers))
        pages = torch.zeros(len(numbers) + 1, *self._pool.shape[1:], dtype=self._pool.dtype)
        pages[:-1] = self._pool[upload(numbers.astype(np.int64), self._pool.device)].cpu()
        arrays = {"slots": slots, "kept": kept, "tables": places[tables[slots]]}
        arrays["pass"] = np.frombuffer(self._encode(begun), np.uint8)
        tensors = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
        about = {"error": error, "version": __version__, "config": asdict(self._config)}
        name = f"pass-{time.strftime('%Y%m%d-%H%M%S')}-{time.monotonic_ns()}.safetensors"
        path = self._folder / name
        path.touch(0o600)  # it has what users wrote
        known = {"format": FORMAT, "about": json.dumps(about)}
        path.write_bytes(save(tensors | {"pages": pages}, known))
        _log.error("a pass has failed: %s; it is in %s", error, path)

    def _encode(self, begun: BegunPass) -> bytes:
        """The pass with the tokens that the device has, and its rows."""
        work, number = begun.work, self._retentions.index
        rows = [
            SavedRow(**structs.asdict(row) | {"retention": number(row.retention)})
            for row in work.rows
        ]
        tokens = begun.inputs[: len(work.tokens)].numpy(force=True)
        # Graphs alone need the padding.
        addresses = replace(work.addresses, padding=None)
        bare = replace(work, rows=(), seals=(), tokens=tokens, addresses=addresses)
        return msgpack.encode((bare, rows), enc_hook=_encode_part)


def _encode_part(part: Any) -> Any:
    if isinstance(part, slice):
        return part.start, part.stop
    target = BytesIO()
    npy.write_array(target, part, allow_pickle=False)
    return target.getvalue()


def _decode_part(kind: Any, part: Any) -> Any:
    if kind is slice:
        return slice(*part)
    array = npy.read_array(BytesIO(part), allow_pickle=False)
    return array.view(_RECORDS.get(array.dtype.names, array.dtype))


def load_pass(path: Path) -> SavedPass:
    """The pass in the file `path`. Raises `ConfigError` if it is none, or of another version."""
    try:
        with safe_open(path, framework="pt") as file:
            known = file.metadata() or {}
            if known.get("format") != FORMAT:
                raise ConfigError(f"{path} is no failed pass: its format is not {FORMAT!r}")
            about = json.loads(known["about"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if about["version"] != __version__:
            raise ConfigError(
                f"{path} was saved by Tangram {about['version']}, this is {__version__}: replay it "
                "with that version"
            )
        names = {field.name for field in fields(EngineConfig)}
        options = {name: value for name, value in about["config"].items() if name in names}
        pages, encoded = tensors.pop("pages"), tensors.pop("pass").numpy().tobytes()
        kind = tuple[Pass, tuple[SavedRow, ...]]
        work, rows = msgpack.decode(encoded, type=kind, dec_hook=_decode_part)
        arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
        config = EngineConfig(**options)
        return SavedPass(config, str(about["error"]), work, rows, pages=pages, **arrays)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} cannot be read as a failed pass: {error}") from error
