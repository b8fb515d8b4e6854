"""llama.cpp's server as a peer, by xllamacpp; runs in its own process and environment.

Requests go to the server in this process, not over HTTP, each from a thread that waits for it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from urllib.request import Request, urlopen

import xllamacpp

from bench.cpu_peers.peer import serve_peer
from tangram_lab.load.asks import Ask
from tangram_lab.load.clock import TimedAnswer


class LlamaPeer:
    """The GGUF file `model` with `slots` sequences of up to `most_tokens` each.

    A slot keeps the KV cache of its last prompt for the next (`cache_prompt`). The copies of
    caches in memory are off (`cache_ram_mib`): they cost time before a prompt that is new.
    """

    packages = ("xllamacpp",)

    def __init__(self, model: str, threads: int, slots: int, most_tokens: int) -> None:
        params: Any = xllamacpp.CommonParams()
        params.model.path = model
        params.n_parallel = slots
        params.n_ctx = slots * most_tokens
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.cache_ram_mib = 0
        self._server: Any = xllamacpp.Server(params)
        self._slots, self._reuses = slots, True

    def encode(self, text: str) -> list[int]:
        """See `Peer`."""
        body = json.dumps({"content": text, "add_special": False}).encode()
        address = f"{self._server.listening_address}/tokenize"
        with urlopen(Request(address, body, {"Content-Type": "application/json"})) as answer:
            return list(json.load(answer)["tokens"])

    def forget(self) -> None:
        """See `Peer`: the next requests reuse no cache."""
        self._reuses = False

    def answer(self, asks: Sequence[Ask]) -> list[TimedAnswer]:
        """See `Peer`."""
        begin = time.perf_counter()
        answers = [TimedAnswer(0.0, len(ask.tokens)) for ask in asks]
        with ThreadPoolExecutor(self._slots) as threads:
            list(threads.map(partial(self._answer_one, begin), asks, answers))
        self._reuses = True
        return answers

    def _answer_one(self, begin: float, ask: Ask, answer: TimedAnswer) -> None:
        body = {
            "prompt": list(ask.tokens),
            "max_tokens": ask.output_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "cache_prompt": self._reuses,
            "stream": True,
            # Token ids stand in the part that `verbose` adds.
            "return_tokens": True,
            "verbose": True,
        }

        def take(event: dict[str, Any]) -> None:
            if "error" in event or "code" in event:
                raise RuntimeError(f"llama.cpp refused a request: {event}")
            told = event["__verbose"]
            # A token that ends within a letter has no event: its id is not told, its time is that
            # of the next event.
            new = told["tokens_predicted"] - len(answer.times_s)
            answer.times_s += [time.perf_counter() - begin] * new
            answer.token_ids += told["tokens"]
            if usage := event.get("usage"):
                answer.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]

        self._server.handle_completions(body, take)


if __name__ == "__main__":
    serve_peer(LlamaPeer)
