"""Servers over a real engine of a tiny random model, whose tokens read as numbers: started in a
second, fast enough to be put under stress. `run_tiny_server` is one in a thread, whose engine a
test can look into.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from transformers import LlamaConfig

from tangram.config import EngineConfig
from tangram.engine.loop import Engine
from tangram.engine.setup.build import engine_of
from tangram.link.linked_engine import LinkedEngine
from tangram.model.load import LoadedModel, load_model
from tangram.serve.http import build_app, transport_options
from tests.running import run_app
from tests.small_engines import check_books, profile_file

from .conftest import MODEL, healthy, wait_until

CHUNK = 32
VOCABULARY = 300
COMPLETIONS = "/v1/completions"


def tiny_folder(path: Path, vocabulary: int = VOCABULARY, context_tokens: int = 4096) -> Path:
    """A model of which there is nothing but its config."""
    LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=context_tokens,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    ).save_pretrained(path)
    return path


def tiny_engine(folder: Path, **options: Any) -> Engine:
    """An engine that serves half of the cache by default, and all of it on request."""
    loaded: LoadedModel = load_model(str(folder), dtype="float32", load_format="dummy")
    defaults: dict[str, Any] = {
        "model": str(folder),
        "dtype": "float32",
        "load_format": "dummy",
        "kv_retention": 0.5,
        "chunk_tokens": CHUNK,
        "page_tokens": 8,
        "heads_per_page": 2,
        "kv_cache_gib": 0.01,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 128,
        "profile": (profile_file(loaded, folder),),
    }
    return engine_of(EngineConfig(**(defaults | options)), loaded)


def numbers(count: int, step: int = 1) -> list[int]:
    """A prompt of token ids; others of another `step`."""
    return [3 + (at * step) % 200 for at in range(count)]


def body(prompt: list[int] | list[list[int]], **fields: Any) -> dict[str, Any]:
    """A completion that only its length ends."""
    return {
        "model": MODEL,
        "prompt": prompt,
        "temperature": 0,
        "ignore_eos": True,
        "max_tokens": 8,
    } | fields


@dataclass
class TinyServer:
    """A server on the loopback and the engine behind it."""

    url: str
    engine: Engine
    stop: Callable[[], None]

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60)

    def complete(self, prompt: list[int], **fields: Any) -> str:
        """The text of an answer."""
        with self.http() as client:
            response = client.post(COMPLETIONS, json=body(prompt, **fields))
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["text"])

    def check_baseline(self) -> None:
        """Nothing runs, nothing is held, the books add up, and whoever asks is answered."""
        wait_until(lambda: self.engine.stats().running == 0, "a request still runs", timeout_s=20)
        wait_until(
            lambda: self.engine.stats().pages_held == 0, "pages are still held", timeout_s=20
        )
        check_books(self.engine)
        assert healthy(self.url)
        assert self.complete(numbers(9, 7), max_tokens=3)
        wait_until(lambda: self.engine.stats().pages_held == 0, "pages are still held")
        assert self.engine.stats().waiting == 0


@contextmanager
def run_tiny_server(
    folder: Path, bounds: Mapping[str, Any] | None = None, **options: Any
) -> Iterator[TinyServer]:
    """A real uvicorn on a free port, in a thread, over a `tiny_engine` of `options`.

    `bounds` are options of `build_app`.
    """
    engine = tiny_engine(folder, **options)
    app = build_app(LinkedEngine(engine), served_model_name=MODEL, **bounds or {})
    with run_app(app, **transport_options()) as running:
        yield TinyServer(running.url, engine, running.stop)
