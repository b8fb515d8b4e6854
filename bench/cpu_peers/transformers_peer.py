"""Transformers' `generate` with SDPA as a peer; runs in its own process.

A lone request continues the cache of the one before, as Transformers documents for chats: the
caller keeps the cache and cuts it to the tokens that both have.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, StoppingCriteriaList

from bench.cpu_peers.peer import count_common, serve_peer
from tangram_lab.load.asks import Ask
from tangram_lab.load.clock import TimedAnswer


class TransformersPeer:
    """`generate` of the model in the folder `model`."""

    packages = ("torch", "transformers")

    def __init__(self, model: str, dtype: str) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(torch, dtype), attn_implementation="sdpa", trust_remote_code=False
        )
        self.forget()

    def encode(self, text: str) -> list[int]:
        """See `Peer`."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def forget(self) -> None:
        """See `Peer`."""
        self._cache, self._tokens = DynamicCache(), list[int]()

    def answer(self, asks: Sequence[Ask]) -> list[TimedAnswer]:
        """See `Peer`. All asks have the same lengths."""
        begin = time.perf_counter()
        prompts = [list(ask.tokens) for ask in asks]
        (output_tokens,) = {ask.output_tokens for ask in asks}
        ids = torch.tensor(prompts)
        times_s: list[float] = []

        def watch(ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
            times_s.append(time.perf_counter() - begin)
            return torch.zeros(len(ids), dtype=torch.bool)

        shared = self._reuse(prompts)
        generated = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=self._cache,
            pad_token_id=0,
            do_sample=False,
            max_new_tokens=output_tokens,
            min_new_tokens=output_tokens,
            stopping_criteria=StoppingCriteriaList([watch]),
        ).tolist()
        self._tokens = generated[0] if len(asks) == 1 else []
        return [
            TimedAnswer(0.0, len(prompt), times_s, row[len(prompt) :], shared)
            for prompt, row in zip(prompts, generated, strict=True)
        ]

    def _reuse(self, prompts: Sequence[list[int]]) -> int:
        """Cut the cache to what a lone prompt has in common with it; its length in tokens."""
        shared = count_common(self._tokens, prompts[0]) if len(prompts) == 1 else 0
        length = self._cache.get_seq_length()
        shared = min(shared, length, len(prompts[0]) - 1)
        if not shared:
            self.forget()
        elif shared < length:
            self._cache.crop(shared - length)
        return shared


if __name__ == "__main__":
    serve_peer(TransformersPeer)
