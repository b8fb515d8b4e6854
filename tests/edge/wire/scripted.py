"""Servers over a real engine whose model says what a test tells it to: only the last layer of the
model is made up. Masks, sampling, text and HTTP are those that serve.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from tangram.config import EngineConfig
from tangram.engine.loop import Engine
from tangram.engine.setup.build import engine_of
from tangram.link.linked_engine import LinkedEngine
from tangram.model.load import load_model
from tangram.serve.http import build_app, transport_options
from tests.running import run_app

from .conftest import MODEL
from .tiny import TinyServer

_CERTAIN = 100.0  # at temperature 1, too


class ScriptedHead(nn.Module):
    """The logits of a model that wants to say `tokens`, and nothing else.

    The place in them follows from the position in the sequence, counted from the first token that
    is sampled after `tokens` were set.
    """

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self._vocabulary, self._tokens, self._first = vocabulary, [0], None
        self.positions: list[int] = []

    def script(self, tokens: Sequence[int]) -> None:
        """Say `tokens` in the next completion."""
        self._tokens, self._first = list(tokens), None

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits [1, n, V]."""
        logits = hidden.new_zeros(*hidden.shape[:-1], self._vocabulary)
        for row, position in enumerate(self.positions):
            self._first = position if self._first is None else self._first
            place = min(position - self._first, len(self._tokens) - 1)
            logits[..., row, self._tokens[place]] = _CERTAIN
        return logits


@dataclass
class ScriptedServer(TinyServer):
    """A server whose model says a script."""

    head: ScriptedHead

    def say(self, tokens: Sequence[int]) -> None:
        """Have the next completion be `tokens`, then the end of the text."""
        (end, *_) = sorted(self.engine.codec.eos_token_ids)
        self.head.script([*tokens, end])


def scripted_engine(folder: Path, vocabulary: int, **options: Any) -> tuple[Engine, ScriptedHead]:
    """An engine of the tiny model and the tokenizer in `folder`, and what its model says."""
    loaded = load_model(str(folder), dtype="float32", load_format="dummy")
    head = ScriptedHead(vocabulary)

    def note_positions(_: nn.Module, __: Any, kwargs: dict[str, Any]) -> None:
        wanted: Tensor = kwargs["position_ids"][0][kwargs["logits_to_keep"]]
        head.positions = wanted.tolist()

    loaded.model.set_output_embeddings(head)
    loaded.model.register_forward_pre_hook(note_positions, with_kwargs=True)
    defaults: dict[str, Any] = {
        "model": str(folder),
        "dtype": "float32",
        "load_format": "dummy",
        "kv_retention": 1.0,
        "chunk_tokens": 32,
        "page_tokens": 8,
        "heads_per_page": 2,
        "kv_cache_gib": 0.02,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 512,
    }
    return engine_of(EngineConfig(**(defaults | options)), loaded), head


@contextmanager
def run_scripted_server(folder: Path, vocabulary: int) -> Iterator[ScriptedServer]:
    """A server of the tiny model and the tokenizer in `folder`."""
    engine, head = scripted_engine(folder, vocabulary)
    app = build_app(LinkedEngine(engine), served_model_name=MODEL)
    with run_app(app, **transport_options()) as running:
        yield ScriptedServer(running.url, engine, running.stop, head)
