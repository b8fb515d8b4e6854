"""Tangram as a peer; runs in its own process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.cpu_peers.peer import serve_peer
from tangram.config import EngineConfig
from tangram.engine.setup.build import build_engine
from tangram_lab.load.asks import Ask
from tangram_lab.load.clock import TimedAnswer, answer_all


class TangramPeer:
    """An engine stepped in this process; `options` are fields of `EngineConfig`."""

    packages = ("torch", "transformers")

    def __init__(self, **options: Any) -> None:
        self._engine = build_engine(EngineConfig(**options))

    def encode(self, text: str) -> list[int]:
        """See `Peer`."""
        return list(self._engine.codec.encode(text))

    def forget(self) -> None:
        """See `Peer`."""
        self._engine.clear_cache()

    def answer(self, asks: Sequence[Ask]) -> list[TimedAnswer]:
        """See `Peer`."""
        return answer_all(self._engine, asks)


if __name__ == "__main__":
    serve_peer(TangramPeer)
