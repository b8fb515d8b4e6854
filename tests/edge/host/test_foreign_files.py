"""Files of users that are not what they seem: each reader refuses them by name and
returns at once.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tangram.calibrate.published_budgets import import_published
from tangram.calibrate.text_files import read_texts
from tangram.compress.library import find_profile
from tangram.compress.profile import ModelFingerprint, Profile, ScorerSpec
from tangram.errors import ConfigError, TangramError
from tangram.foreign_files import replace_file
from tangram_lab.accuracy.conversation import read_conversations
from tangram_lab.accuracy.passages import _read
from tangram_lab.accuracy.results import Results
from tangram_lab.load.asks import read_trace

KEYDIFF = ScorerSpec("keydiff", {})
READERS: list[Callable[[Path], object]] = [
    Profile.load,
    read_texts,
    Results.load,
    read_conversations,
    lambda path: read_trace(path, seconds=1, speed=1, vocab_size=8),
    lambda path: import_published(path, "gpt-oss-20b", KEYDIFF, "model", 0.5),
]


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b"\xff\xfe{}", b"", b'{"a": ', b'{"text": "\\ud800"}', None]
)
def test_a_file_that_is_no_json_is_refused(
    read: Callable[[Path], object], content: bytes | None, tmp_path: Path
) -> None:
    path = tmp_path / "file.jsonl"
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(TangramError, match=r"file\.jsonl|file: "):
        read(path)


@pytest.mark.parametrize("depth", [*range(50, 1000, 50), 100_000])
def test_a_nested_file_among_the_profiles_is_passed_over(
    depth: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At any depth: some are too deep for a reader, others only for who looks at what was read."""
    nested = '{"format_version": 1, "mean": ' + "[" * depth + "]" * depth + "}"
    (tmp_path / "a.json").write_text(nested if depth < 100_000 else "[" * depth)
    fingerprint = ModelFingerprint("m", "llama", 1, 1, 1, 8)
    assert find_profile([tmp_path], fingerprint, "keydiff", "model", 0.5, 512) is None
    assert f"{tmp_path}/a.json" in caplog.text


@pytest.mark.parametrize("value", ["a", None, [], -1, float("nan"), True, 10**400])
@pytest.mark.parametrize("field", ["timestamp", "input_length", "output_length", "hash_ids"])
def test_a_trace_names_the_field_that_is_no_number(
    field: str, value: object, tmp_path: Path
) -> None:
    entry = {"timestamp": 0, "input_length": 3, "output_length": 1, "hash_ids": [1]}
    given = [value] if field == "hash_ids" else value
    (tmp_path / "t.jsonl").write_text(json.dumps(entry | {field: given}))
    if value == 10**400 and field in ("output_length", "hash_ids"):
        return  # as large as it likes: the engine refuses the one, the other is a name
    with pytest.raises(ConfigError, match=rf"t\.jsonl:1: .*({field}|tokens, input_length)"):
        read_trace(tmp_path / "t.jsonl", seconds=1, speed=1, vocab_size=8)


@pytest.mark.parametrize("read", [*READERS, _read])
def test_nobody_waits_for_a_pipe(read: Callable[[Path], object], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "file.jsonl")
    with pytest.raises(TangramError, match="regular file"):
        read(tmp_path / "file.jsonl")


def full(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text[:3])
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / ("a" * 255)  # no longer name is allowed, not even for a while
    with replace_file(path) as file:
        file.write_text("first")
    with pytest.raises(OSError, match="No space"), replace_file(path) as file:
        full(file, "second")
    assert [each.read_text() for each in tmp_path.iterdir()] == ["first"]


def test_a_link_to_a_file_stays_one(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("file")
    with replace_file(tmp_path / "link") as file:
        file.write_text("new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "new"


def test_a_device_or_pipe_is_written_and_not_replaced(tmp_path: Path) -> None:
    """As root, whoever writes to /dev/null would be its end."""
    with replace_file("/dev/null") as file:
        assert file == Path("/dev/null")
    os.mkfifo(pipe := tmp_path / "pipe")
    (tmp_path / "link").symlink_to(pipe)
    with replace_file(tmp_path / "link") as file:
        assert file.is_fifo()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["link", "pipe"]
