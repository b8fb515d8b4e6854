"""Models and profiles, made once."""

from __future__ import annotations

from typing import Any

import pytest

from engines import CHUNK, fork, make_tiny, tiny_options
from tangram.model.convert import convert_gguf
from tangram.model.source import EMBEDDED, gguf_file


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The arguments of an engine of the tiny model."""
    folder = tmp_path_factory.mktemp("tiny")
    fork(lambda: make_tiny(folder), {})
    return {"model": str(folder), "max_model_len": 1024, "block_size": CHUNK, "max_num_seqs": 8}


@pytest.fixture(scope="session")
def half(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The options of the plugin at ρ 0.5 for the tiny model."""
    return tiny_options(tmp_path_factory.mktemp("profiles"))


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The arguments of an engine of the embedded model."""
    named = tmp_path_factory.mktemp("smollm2") / "folder"
    done = fork(lambda: named.write_text(str(convert_gguf(gguf_file(EMBEDDED)))), {})
    assert done.succeeded, done.log
    folder = named.read_text()
    return {"model": folder, "max_model_len": 4096, "block_size": 512, "max_num_seqs": 8}
