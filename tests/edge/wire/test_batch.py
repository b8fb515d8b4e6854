"""Files of requests: every line gets an answer or an error, once, however often the run is cut."""

from __future__ import annotations

import errno
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tangram.cli import app
from tangram.errors import ConfigError, MachineError, TangramError
from tangram.link.linked_engine import LinkedEngine
from tangram.serve.batch import BatchFiles, answer_all
from tangram.serve.service import Service
from tests.mentions import mentioning, mentions

from .conftest import CHAT, COMPLETIONS, MODEL, USER
from .fake_engine import FakeEngine, FakeGrammars
from .tiny import numbers, tiny_folder


def line(custom_id: Any, url: str = COMPLETIONS, **fields: Any) -> str:
    prompt = {"messages": [USER]} if url == CHAT else {"prompt": "abc"}
    body = {"model": MODEL, **prompt, **fields}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def run(folder: Path, lines: list[str], engine: FakeEngine | None = None) -> tuple[list[Any], int]:
    """The records of the output and the number of failures, of a run over `lines`."""
    (folder / "in.jsonl").write_text("\n".join(lines) + "\n")
    files = BatchFiles(folder / "in.jsonl", folder / "out.jsonl")
    failed = answer_all(
        Service(LinkedEngine(engine or FakeEngine()), MODEL), files, at_once=3, on_line=lambda: None
    )
    return [
        json.loads(record) for record in (folder / "out.jsonl").read_text().splitlines()
    ], failed


def test_both_endpoints_are_answered_by_custom_id(tmp_path: Path) -> None:
    lines = [line(f"text {number}", prompt="ab" * (number + 1)) for number in range(8)]
    records, failed = run(tmp_path, [line("chat", CHAT), "", *lines, line("two", n=2, echo=True)])
    by_id = {record["custom_id"]: record for record in records}
    assert (len(records), failed) == (10, 0)
    assert by_id["chat"]["response"]["body"]["choices"][0]["message"]["content"] == "ti yas>resu<"
    assert by_id["chat"]["response"]["body"]["object"] == "chat.completion"
    for number in range(8):
        assert (
            by_id[f"text {number}"]["response"]["body"]["choices"][0]["text"]
            == ("ba" * (number + 1))[:16]
        )
    assert [choice["text"] for choice in by_id["two"]["response"]["body"]["choices"]] == [
        "abccba"
    ] * 2
    assert all(
        record["error"] is None and record["response"]["status_code"] == 200 for record in records
    )


def test_a_wrong_line_gets_an_error_and_the_others_their_answers(tmp_path: Path) -> None:
    wrong = {
        "not json": ("{", None, None),
        "no object": ("[1]", None, None),
        "no id": ('{"method": "POST"}', "custom_id", None),
        "url": (line("u").replace(COMPLETIONS, "/v1/embeddings"), "url", None),
        "method": (line("m").replace("POST", "GET"), "method", None),
        "extra": (line("e").replace('"method"', '"color": 1, "method"'), "color", None),
        "again": (line("fine"), "custom_id", None),
        "field": (line("f", temprature=1), "temprature", 400),
        "value": (line("v", temperature=-1), "temperature", 400),
        "nested": (line("n", CHAT, messages=[{"role": "user"}]), "messages[0].content", 400),
        "model": (line("g", model="gpt-4"), "model", 404),
        "stream": (line("s", stream=True), "stream", 400),
        "logprobs": (line("p", n=128, max_tokens=100, logprobs=20), "logprobs", 400),
        "too long": (line("l", prompt="x" * 600), "prompt", 400),
        "engine": (line("b", prompt="broken"), None, 500),
    }
    records, failed = run(
        tmp_path, [line("fine"), *(text for text, _, _ in wrong.values()), line("last")]
    )
    by_line = {record["id"]: record for record in records}
    assert (len(records), failed) == (len(wrong) + 2, len(wrong))
    for number, (name, (_, param, status)) in enumerate(wrong.items(), 2):
        record = by_line[f"line-{number}"]
        assert record["error"]["param"] == param, name
        assert (record["response"] or {}).get("status_code") == status, name
    huge = by_line[f"line-{2 + list(wrong).index('logprobs')}"]["error"]["message"]
    assert "fewer choices" in huge and "stream" not in huge, "a file has no streams"
    assert by_line["line-1"]["error"] is None and by_line[f"line-{len(wrong) + 2}"]["error"] is None


def test_a_second_run_does_only_what_is_left(tmp_path: Path) -> None:
    lines = [line("a"), line("b"), line("c")]
    first, _ = run(tmp_path, lines)
    output = tmp_path / "out.jsonl"
    kept = output.read_text()
    engine = FakeEngine()
    _, failed = run(tmp_path, lines, engine)
    assert (output.read_text(), failed, engine.submitted) == (kept, 0, [])
    whole = [json.dumps(record) for record in first if record["custom_id"] != "c"]
    output.write_text("\n".join(whole) + '\n{"id": "line-4", "custom_id": "c", "resp')
    resumed, failed = run(tmp_path, [line("new"), *lines], engine := FakeEngine())
    assert [record["custom_id"] for record in resumed[:2]] == ["a", "b"]
    assert {record["custom_id"] for record in resumed[2:]} == {"c", "new"}
    assert len(engine.submitted) == 2


def test_a_second_run_tries_again_what_has_an_error(tmp_path: Path) -> None:
    """Whether the engine had failed or the line was wrong, which somebody may have mended."""
    lines = [line("a"), "{", line("b", temperature=-1), line("c", prompt="broken"), line("d")]
    first, failed = run(tmp_path, lines)
    assert failed == 3
    again, failed = run(tmp_path, lines, engine := FakeEngine())
    assert failed == 3, "the output still has errors"
    assert len(again) == len(first) == 5
    assert [record["custom_id"] for record in again[:2]] == ["a", "d"]
    assert len(engine.submitted) == 1
    mended = [line("a"), line("new"), line("b"), line("c"), line("d")]
    all_of_them, failed = run(tmp_path, mended, engine := FakeEngine())
    assert failed == 0
    assert sorted(record["custom_id"] for record in all_of_them) == ["a", "b", "c", "d", "new"]
    assert len(engine.submitted) == 3


def test_errors_of_other_requests_stay_in_the_output(tmp_path: Path) -> None:
    run(tmp_path, [line("of another file", temperature=-1), line("b", temperature=-1)])
    records, failed = run(tmp_path, ["", line("b")])
    assert failed == 0
    assert [(record["custom_id"], record["error"] is None) for record in records] == [
        ("of another file", False),
        ("b", True),
    ]


def test_an_output_is_replaced_where_it_lies_and_as_it_was(tmp_path: Path) -> None:
    lines = [line("a"), line("b", temperature=-1)]
    run(tmp_path, lines)
    output, elsewhere = tmp_path / "out.jsonl", tmp_path / "elsewhere"
    elsewhere.mkdir()
    output.rename(elsewhere / "answers")
    (elsewhere / "answers").chmod(0o640)
    output.symlink_to(elsewhere / "answers")
    records, _ = run(tmp_path, lines)
    assert len(records) == 2 and output.is_symlink()
    assert (elsewhere / "answers").stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in elsewhere.iterdir()) == ["answers"]


def test_a_dead_engine_writes_no_answers_and_says_so(tmp_path: Path) -> None:
    engine = FakeEngine()

    def dies(*_: object) -> None:
        engine.healthy = False
        raise RuntimeError("gone")

    engine.submit = dies  # type: ignore[method-assign]
    with pytest.raises(TangramError, match=mentioning("again")):
        run(tmp_path, [line("a"), line("b")], engine)
    assert engine.stopped
    assert (tmp_path / "out.jsonl").read_text() == ""
    assert run(tmp_path, [line("a"), line("b")])[1] == 0


def test_a_machine_without_memory_costs_no_line_its_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise MachineError("no space to try the grammar")

    lines = [line("a"), line("b", response_format={"type": "json_object"})]
    with monkeypatch.context() as patched, pytest.raises(MachineError, match="no space"):
        patched.setattr(FakeGrammars, "compile", fails)
        run(tmp_path, lines)
    records, failed = run(tmp_path, lines)
    assert ({record["custom_id"] for record in records}, failed) == ({"a", "b"}, 0)


ANSWER = '{"id": "line-1", "custom_id": "a", "response": {"status_code": 200}, "error": null}'


@pytest.mark.parametrize(
    ("content", "number"),
    [
        ("my thesis\n", 1),
        ("my thesis, without an end", 1),
        (f"{ANSWER}\nmy thesis", 2),
        ('{"custom_id": "a"}\n', 1),
        ('{"custom_id": "a", "response": null, "error": null}\n', 1),
        ('{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}', 1),
        (f"{ANSWER}\n\n{ANSWER}\n", 2),
        ('{"id": "somebody else\'s', 1),
        ("[" * 100_000, 1),
    ],
)
def test_a_file_that_is_no_output_is_left_alone(content: str, number: int, tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=mentioning(f"output line {number}")):
        run(tmp_path, [line("a")])
    assert (tmp_path / "out.jsonl").read_text() == content


@pytest.mark.parametrize("link", ["same", "symbolic", "hard"])
def test_the_requests_are_never_overwritten(link: str, tmp_path: Path) -> None:
    source, target = (
        tmp_path / "in.jsonl",
        tmp_path / ("in.jsonl" if link == "same" else "out.jsonl"),
    )
    source.write_text(requests := line("a") + "\n" + line("b"))
    if link != "same":
        target.symlink_to(source) if link == "symbolic" else target.hardlink_to(source)
    with pytest.raises(ConfigError, match=mentioning("output requests")):
        BatchFiles(source, target)
    assert source.read_text() == requests


@pytest.mark.parametrize("kind", ["pipe", "device", "link in a circle", "long name"])
def test_an_output_that_is_no_file_is_refused_and_not_waited_for(kind: str, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(line("a"))
    target = tmp_path / ("a" * 300 if kind == "long name" else "out.jsonl")
    if kind == "pipe":
        os.mkfifo(target)
    elif kind != "long name":
        target.symlink_to("/dev/zero" if kind == "device" else target)
    with pytest.raises(ConfigError, match="output"):
        BatchFiles(tmp_path / "in.jsonl", target)


def test_two_runs_do_not_write_one_output(tmp_path: Path) -> None:
    """The second would take what the first is writing for the rest of a crash, and cut it off."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(line("a"))
    target.write_text(f"{ANSWER}\n{ANSWER[:30]}")
    first = BatchFiles(source, target)
    with target.open("a") as file:
        file.write(ANSWER[:40])
    with pytest.raises(ConfigError, match=mentioning("output another run")):
        BatchFiles(source, target)
    assert target.read_text() == f"{ANSWER}\n{ANSWER[:40]}"
    first.output.close()
    second = BatchFiles(source, target)
    assert second.skipped == 1
    second.output.close()


class FullFile(io.FileIO):
    """A file on a disk with space for 700 bytes."""

    def write(self, data: Any) -> int:
        left = 700 - self.tell()
        if left <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(data[:left])


def test_a_full_disk_costs_one_answer_at_most(tmp_path: Path) -> None:
    lines = [line(str(number)) for number in range(4)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    files = BatchFiles(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    files.output.close()
    files.output = FullFile(files.target, "a+")
    with pytest.raises(TangramError, match=mentioning("output space")):
        answer_all(
            Service(LinkedEngine(FakeEngine()), MODEL), files, at_once=1, on_line=lambda: None
        )
    assert (tmp_path / "out.jsonl").stat().st_size == 700
    records, failed = run(tmp_path, lines, engine := FakeEngine())
    assert ([record["custom_id"] for record in records], failed) == (["0", "1", "2", "3"], 0)
    assert len(engine.submitted) < 4, "what was answered is answered again"


@pytest.mark.parametrize("cut", [1, 5, 13, 30, len(ANSWER) - 1])
def test_a_crash_costs_one_answer_at_most(cut: int, tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text(f"{ANSWER}\n{ANSWER.replace('line-1', 'line-2')[:cut]}")
    records, failed = run(tmp_path, [line("a"), line("b")], engine := FakeEngine())
    assert ([record["custom_id"] for record in records], failed, len(engine.submitted)) == (
        ["a", "b"],
        0,
        1,
    )


def test_a_last_answer_without_a_line_end_counts(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text(ANSWER)
    records, _ = run(tmp_path, [line("a"), line("b")])
    assert [record["custom_id"] for record in records] == ["a", "b"]


def test_a_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    records, failed = run(tmp_path, ["\ufeff" + line("a")])
    assert (records[0]["custom_id"], failed) == ("a", 0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--batch", "in.jsonl"], "output"),
        (["--batch", "absent.jsonl", "-o", "out.jsonl"], "absent.jsonl"),
        (["--batch", "in.jsonl", "-o", "absent/out.jsonl"], "output absent"),
        (["--batch", "in.jsonl", "-o", "out.jsonl", "-p", "text"], "prompt 'text'"),
        (["--batch", "in.jsonl", "-o", "out.jsonl", "--temperature", "0"], "temperature 0.0"),
        (["-o", "out.jsonl"], "prompt"),
        (["-p", "text", "-o", "out.jsonl"], "output batch"),
    ],
)
def test_options_that_do_not_go_together(
    options: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text(line("a"))
    result = CliRunner().invoke(app, ["generate", *options])
    assert result.exit_code == 2
    assert mentions(result.output, words)


def test_a_model_from_a_folder_goes_by_the_name_that_a_server_gives_it(tmp_path: Path) -> None:
    source, target, folder = (
        tmp_path / "in.jsonl",
        tmp_path / "out.jsonl",
        tiny_folder(tmp_path / "a.model"),
    )
    prompt = {"prompt": numbers(9), "max_tokens": 3}
    source.write_text(
        "\n".join(
            [line("name", model="a.model", **prompt), line("path", model=str(folder), **prompt)]
        )
    )
    options = ["--load-format", "dummy", "--kv-retention", "1.0", "--kv-cache-gib", "0.02"]
    result = CliRunner().invoke(
        app, ["generate", str(folder), "--batch", str(source), "-o", str(target), *options]
    )
    assert result.exit_code == 1, result.output
    found = {
        r["custom_id"]: r["response"] for r in map(json.loads, target.read_text().splitlines())
    }
    assert {name: response["status_code"] for name, response in found.items()} == {
        "name": 200,
        "path": 404,
    }
    assert found["name"]["body"]["model"] == "a.model"


def test_a_real_model_answers_a_file(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        line(str(number), CHAT, model="smollm2", max_tokens=3, temperature=0) for number in range(3)
    ]
    source.write_text("\n".join([*lines, line("x", model="gpt-4")]))
    result = CliRunner().invoke(
        app, ["generate", "smollm2", "--batch", str(source), "-o", str(target)]
    )
    assert result.exit_code == 1, "a line that failed"
    assert "3 answered, 1 with errors, 0 skipped" in " ".join(result.output.split())
    records = [json.loads(record) for record in target.read_text().splitlines()]
    answers = {
        r["response"]["body"]["choices"][0]["message"]["content"]
        for r in records
        if r["error"] is None
    }
    assert len(answers) == 1


def test_what_is_no_line_is_told_why_in_words_of_the_format(tmp_path: Path) -> None:
    twice = line("a").replace('"method"', '"url": "/v1/completions", "method"')
    wrong = {"[": "not valid JSON", "5": "JSON object", twice: "'url' once"}
    wrong['{"custom_id": ' + "1" * 5000 + "}"] = "5000 4300"
    records, failed = run(tmp_path, list(wrong))
    assert failed == len(wrong)
    for record in records:
        number = int(record["id"].removeprefix("line-"))
        message = record["error"]["message"]
        assert mentions(message, list(wrong.values())[number - 1]) and "_Line" not in message
