"""Files of users that are not what they seem: each reader refuses them by name and returns at once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tangram.calibrate.files import read_texts
from tangram.compress.profile import Profile
from tangram.errors import TangramError
from tangram.lab.accuracy.conversation import read_conversations
from tangram.lab.accuracy.results import Results
from tangram.lab.load.asks import traced
from tangram.plan.policy import Policy

READERS: list[Callable[[Path], object]] = [
    Profile.load,
    read_texts,
    Policy.load,
    Results.load,
    read_conversations,
    lambda path: traced(path, seconds=1, speed=1, vocab_size=8),
]


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("content", [b"[" * 100_000, b"\xff\xfe{}", b"", b'{"a": ', None])
def test_a_file_that_is_no_json_is_refused(
    read: Callable[[Path], object], content: bytes | None, tmp_path: Path
) -> None:
    path = tmp_path / "file.jsonl"
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(TangramError, match=r"file\.jsonl|file: "):
        read(path)


@pytest.mark.parametrize("read", READERS)
def test_nobody_waits_for_a_pipe(read: Callable[[Path], object], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "file.jsonl")
    with pytest.raises(TangramError, match="regular file"):
        read(tmp_path / "file.jsonl")
