"""`tangram chat` without a model: its commands, entries of several lines, and the line below an
answer.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tangram.cli.answering import TerminalAnswer, describe_memory, escape_controls
from tangram.cli.chat_history import COMMANDS, ChatHistory
from tangram.cli.terminal import entry, history_file
from tangram.errors import RequestError, TangramError
from tangram.types import Event, FinishReason, Usage
from tests.mentions import mentioning, mentions

SERVED = (0.5, 1.0)


def check(ratio: float, scorer: str | None) -> None:
    if ratio not in SERVED:
        raise RequestError(f"kv_retention is {ratio}, there are {SERVED}", "kv_retention")
    if scorer not in (None, "keydiff"):
        raise RequestError(f"kv_scorer is {scorer!r}, there is keydiff", "kv_scorer")


@pytest.fixture
def talk() -> ChatHistory:
    return ChatHistory(
        lambda text: len(text.split()), check, most_tokens=50, most_bytes=400, default_retention=0.5
    )


def typing(*lines: str) -> Callable[[str], str]:
    given = iter(lines)

    def read(prompt: str) -> str:
        for line in given:
            return line
        raise EOFError

    return read


@pytest.mark.parametrize(
    ("lines", "made"),
    [
        (["hello"], "hello"),
        (["one\\", "two\\", "three", "four"], "one\ntwo\nthree"),
        (['"""a', "", 'b"""', "c"], "a\n\nb"),
        (['"""', "a \\", "b", '"""'], "a \\\nb"),
        (['"""one line"""', "b"], "one line"),
        (["ends\\"], "ends"),
        (['"""never', "closed"], "never\nclosed"),
        (["   "], ""),
    ],
)
def test_an_entry_may_have_several_lines(lines: list[str], made: str) -> None:
    assert entry(typing(*lines), "you  ") == made


def test_the_end_of_the_input_is_no_entry() -> None:
    with pytest.raises(EOFError):
        entry(typing(), "you  ")


def test_what_was_said_is_sent_again_and_clear_forgets_it(talk: ChatHistory) -> None:
    talk.command("/system Be brief.")
    talk.enter("Who?", "Ann, half an ans")
    assert talk.add_question("Why?") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": "Ann, half an ans"},
        {"role": "user", "content": "Why?"},
    ]
    talk.command("/clear")
    assert [message["role"] for message in talk.add_question("Why?")] == ["system", "user"]
    talk.command("/system")
    assert talk.add_question("Why?") == [{"role": "user", "content": "Why?"}]


def test_a_file_goes_before_the_next_question_and_stays(talk: ChatHistory, tmp_path: Path) -> None:
    notes = tmp_path / "my notes.txt"
    notes.write_text("the key is under the mat\n")
    assert mentions(talk.command(f'/file "{notes}"') or "", "notes.txt 6")
    (message,) = talk.add_question("Where?")
    assert message["content"] == "[my notes.txt]\nthe key is under the mat\n\nWhere?"
    assert talk.add_question("Where?") == [message], "asking changes nothing: a question may fail"
    talk.enter("Where?", "There.")
    assert (
        talk.add_question("Sure?")[0] == message
        and talk.add_question("Sure?")[-1]["content"] == "Sure?"
    )


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "there"),
        (b"", "empty"),
        (b"\xff\xfe\x00", "UTF-8"),
        (b"a\0b", "text"),
        (b"word " * 60, "60 50"),
        (b"word " * 100, "500 50"),
    ],
)
def test_a_file_that_cannot_be_sent_is_one_line(
    talk: ChatHistory, tmp_path: Path, content: bytes | None, why: str
) -> None:
    source = tmp_path / "file.txt"
    if content is not None:
        source.write_bytes(content)
    with pytest.raises(RequestError, match=mentioning(f"{source} {why}")) as told:
        talk.command(f"/file {source}")
    assert "\n" not in str(told.value) and not talk.documents
    with pytest.raises(RequestError, match=mentioning(f"{tmp_path} folder")):
        talk.command(f"/file {tmp_path}")


def test_the_retention_of_the_next_answers(talk: ChatHistory) -> None:
    assert talk.kv_retention is None and talk.retention == 0.5
    assert mentions(talk.command("/retention 1.0") or "", "kv_retention 1")
    assert talk.kv_retention == 1.0
    for wrong in ("0.3", "half"):
        with pytest.raises(RequestError, match=mentioning(f"kv_retention {wrong} 0.5 1.0")):
            talk.command(f"/retention {wrong}")
    assert talk.kv_retention == 1.0


def test_the_scorer_of_the_next_answers(talk: ChatHistory) -> None:
    told = talk.command("/retention 0.5  keydiff")
    assert mentions(told or "", "kv_retention 0.5 keydiff")
    with pytest.raises(RequestError, match=mentioning("kv_scorer 'snap'")):
        talk.command("/retention 1.0 snap")
    assert (talk.kv_retention, talk.kv_scorer) == (0.5, "keydiff")
    assert mentions(talk.command("/retention 0.5") or "", "kv_retention 0.5")
    assert talk.kv_scorer is None


def test_what_looks_like_a_command_but_is_none(talk: ChatHistory) -> None:
    for text in ("hello", "/usr/bin has what?", "a /clear", "/ is a sign", "/A"):
        assert talk.command(text) is None
    with pytest.raises(RequestError, match=mentioning("/quit /help")):
        talk.command("/quit")
    with pytest.raises(RequestError, match=mentioning("/clear nothing")):
        talk.command("/clear all")
    with pytest.raises(EOFError):
        talk.command("/exit")
    told = talk.command("/help") or ""
    assert all(usage in told for usage in COMMANDS)


MIB = 2**20


@pytest.mark.parametrize(
    ("usage", "retention", "told"),
    [
        (
            Usage(100, 20, 0, 72 * MIB // 10, 66 * MIB // 10),
            0.5,
            "KV 7.2 MiB, nothing to compress yet (below one chunk of 512 tokens)",
        ),
        (Usage(100, 20, 0, 72 * MIB // 10, 66 * MIB // 10), 1.0, "KV 7.2 MiB, ρ 1.0 drops nothing"),
        (Usage(512, 1, 0, 5 * MIB, 10 * MIB), 0.5, "KV 5.0 MiB, 50% of uncompressed (ρ 0.5)"),
        (
            Usage(600, 9, 0, 7 * MIB, 10 * MIB),
            0.5,
            "KV 7.0 MiB, 70% of uncompressed (ρ 0.5, the newest 96 tokens are whole)",
        ),
        (
            Usage(600, 425, 0, 9 * MIB, 12 * MIB),
            0.5,
            "KV 9.0 MiB, 75% of uncompressed (ρ 0.5, the newest 512 tokens are whole)",
        ),
        (
            Usage(600, 9, 0, 11 * MIB, 10 * MIB),
            0.99,
            "KV 11.0 MiB, no less than uncompressed (ρ 0.99, the newest 96 tokens are whole)",
        ),
    ],
)
def test_memory_is_never_more_than_all_of_it(usage: Usage, retention: float, told: str) -> None:
    assert describe_memory(usage, retention, 512) == told


def test_an_answer_that_the_engine_gives_up_is_an_error() -> None:
    event = Event("1", 0, (), (), Usage(1, 0, 0, 0, 0), FinishReason.ABORT, "no memory")
    with pytest.raises(TangramError, match="no memory"):
        TerminalAnswer().take(event, "")


def test_text_moves_no_cursor() -> None:
    assert escape_controls("a\x1b[2Jb\r\n\tc\x9b") == "a[2Jb\n\tc"


def test_lines_are_kept_in_the_folder_of_state(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert history_file() == tmp_path / "tangram" / "chat_history"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert history_file() == tmp_path / "home" / ".local" / "state" / "tangram" / "chat_history"
