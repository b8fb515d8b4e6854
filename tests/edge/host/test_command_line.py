"""What the command line says of its options, and of options that belong to others."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tangram.cli import app
from tangram.cli.foreign import INSTEAD, NONE, explain
from tangram.cli.lab import LabCommand
from tangram.cli.options import Panel
from tests.mentions import mentions

CLI = CliRunner()


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(command, LabCommand):
        command = command.inner
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*path, name))


ALL = dict(commands(typer.main.get_command(app)))
SHARED = {
    "kv_retention": "Compression",
    "kv_cache_gib": "Memory",
    "max_num_seqs": "Batching",
    "dtype": "Model",
}


def options(command: Any) -> list[Any]:
    return [
        param for param in command.params if param.param_type_name == "option" and not param.hidden
    ]


def names(command: Any) -> set[str]:
    return {name for param in options(command) for name in (*param.opts, *param.secondary_opts)}


def show_help(path: tuple[str, ...], columns: int) -> tuple[list[str], str]:
    """The lines of a command's help, and its text without boxes and line breaks."""
    result = CLI.invoke(
        app, [*path, "--help"], env={"COLUMNS": str(columns)}, catch_exceptions=False
    )
    assert result.exit_code == 0
    lines = result.output.splitlines()
    return lines, " ".join(" ".join(line.strip(" │╭╰╮╯─") for line in lines).split())


@pytest.mark.parametrize("name", ["eval", "bench"])
def test_the_list_says_of_a_command_of_the_lab_what_its_help_begins_with(name: str) -> None:
    listed = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    assert isinstance(listed, LabCommand) and listed.help == listed.inner.help


@pytest.mark.parametrize("columns", [80, 100])
@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_help_shows_every_option_and_its_default_whole(path: tuple[str, ...], columns: int) -> None:
    lines, text = show_help(path, columns)
    assert "…" not in text and max(map(len, lines)) <= columns
    for param in options(ALL[path]):
        for name in (*param.opts, *param.secondary_opts):
            assert f"{name} " in text, name
        if param.show_default and param.default not in (None, False) and param.name != "help":
            default = param.show_default if isinstance(param.show_default, str) else param.default
            value = getattr(default, "value", default)
            rest = text[text.index(f"{param.opts[0]} ") :]
            assert "[default: " in rest and str("align" if value is True else value) in rest, (
                param.name
            )
        elif isinstance(param.show_default, str):
            assert f"[default: ({param.show_default})]" in text, param.name


@pytest.mark.parametrize("command", ["serve", "deploy", "chat", "generate", "eval"])
def test_the_options_of_an_engine_stand_in_panels(command: str) -> None:
    lines, _ = show_help((command,), 100)
    titles = [line.strip(" ╭─╮") for line in lines if line.startswith("╭─")]
    absent = {"serve": {Panel.replicas}, "deploy": set()}.get(
        command, {Panel.replicas, Panel.server}
    )
    expected = [panel.value for panel in Panel if panel not in absent]
    assert [title for title in titles if title not in ("Arguments", "Options")] == expected
    panels = {param.name: param.rich_help_panel for param in options(ALL[command,])}
    assert {name: panels[name] for name in SHARED} == SHARED


def test_one_name_means_one_thing() -> None:
    """Commands that share a name begin to say the same of it."""
    said: dict[str, set[str]] = {}
    for command in ALL.values():
        for param in options(command):
            said.setdefault(param.opts[0], set()).add(re.split("[,;:(]", param.help)[0].strip())
    files = {"--output", "--report", "--plot"}  # what a command has to write
    counts = {"--requests", "--input-tokens", "--replicas"}
    own = {"--seed", "--dtype", "--max-tokens", "--temperature"}
    assert {name for name, texts in said.items() if len(texts) > 1} <= files | counts | own


@pytest.mark.parametrize(
    ("command", "old", "new"),
    [
        ("eval", "--scorers", "--scorer"),
        ("eval", "--retentions", "--kv-retention"),
        ("eval", "--scopes", "--scope"),
        ("calibrate", "--samples", "--calibration-samples"),
        ("size", "--context", "--context-tokens"),
        ("bench serving ablation", "--batch", "--batch-requests"),
        ("serve", "--enable-prefix-caching", "--no-enable-prefix-caching"),
    ],
)
def test_a_renamed_option_keeps_its_old_name_unseen(command: str, old: str, new: str) -> None:
    path = tuple(command.split())
    known = names(ALL[path])
    assert new in known and old not in known
    said = [
        CLI.invoke(app, [*path, *value, "--there-is-no-such-option"]).output
        for value in ([old] if old.startswith("--enable") else [old, "1"], [])
    ]
    assert said[0] == said[1] and "--there-is-no-such-option" in said[0], "the old name is taken"


def test_prefix_caching_is_on_and_its_last_name_wins() -> None:
    serve = ALL["serve",]
    for given, off in (
        ([], False),
        (["--no-enable-prefix-caching"], True),
        (["--enable-prefix-caching"], False),
        (["--no-enable-prefix-caching", "--enable-prefix-caching"], False),
    ):
        assert serve.make_context("serve", list(given)).params["no_enable_prefix_caching"] is off


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_every_option_takes_its_own_value(path: tuple[str, ...]) -> None:
    """Not the flag `--no-x`, whose positive name an option `--x` may have."""
    command = ALL[path]
    for param in options(command):
        for name in param.opts:
            parser = command.make_parser(typer.Context(command))
            given, rest, _ = parser.parse_args([name, *([] if param.is_flag else ["a value"])])
            assert given[param.name] and not rest, name


@pytest.mark.parametrize(
    ("given", "page", "no_page"),
    [
        ([], "auto", False),
        (["--page", "open"], "open", False),
        (["--page=off"], "off", False),
        (["--no-page"], "auto", True),
        (["--no-page", "--page", "auto"], "auto", True),
    ],
)
def test_the_page_has_an_option_and_a_flag(given: list[str], page: str, no_page: bool) -> None:
    params = ALL["serve",].make_context("serve", [*given, "smollm2"]).params
    assert (params["page"].value, params["no_page"], params["model"]) == (page, no_page, "smollm2")


def test_foreign_options_are_none_of_ours_and_point_at_ours() -> None:
    ours = set().union(*(names(command) for command in ALL.values())) | {"--enable-prefix-caching"}
    assert not [name for name in ours if explain(name, [])], "our own needs no translation"
    assert {instead.split()[0] for instead in INSTEAD} <= ours


def test_every_row_of_foreign_options_is_met() -> None:
    """None is hidden behind a pattern of a row before it."""
    for rows, start in ((INSTEAD, "It is "), (NONE, "There is none: ")):
        for row, theirs in rows.items():
            for pattern in theirs.split():
                said = explain(pattern.replace("*", "x").replace("?", "x"), []) or ""
                assert f"{start}{row.split(' ')[0]} " in said, pattern


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["serve", "--ctx-size", "4096"], "--ctx-size --max-model-len"),
        (["serve", "--swap-space=4"], "--swap-space --kv-offload-gib"),
        (["serve", "--mem-fraction-static", "0.8"], "--gpu-memory-utilization"),
        (["serve", "--max-lora-rank", "8"], "--max-lora-rank LoRA"),
        (["serve", "-c", "4096"], "-c --max-model-len"),
        (["serve", "smollm2", "-ngl", "99"], "-ngl --device"),
        (["chat", "-np", "4"], "-np --max-num-seqs"),
        (["serve", "-tp", "2"], "-tp --tensor-parallel-size"),
        (["serve", "--pipeline-parallel-size", "2"], "--tensor-parallel-size"),
        (["calibrate", "--parallel", "2"], "--parallel --max-num-seqs"),
        (["-m", "model.gguf"], "-m MODEL"),
        (["serve", "--max-num-seq", "4"], "--max-num-seq --max-num-seqs"),
    ],
)
def test_an_option_of_another_engine_is_explained(given: list[str], said: str) -> None:
    result = CLI.invoke(app, given, env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert mentions(result.output, said)


def test_an_option_of_nobody_is_only_named() -> None:
    output = CLI.invoke(app, ["serve", "--frobnicate"], env={"COLUMNS": "200"}).output
    assert re.search("--frobnicate +│", output)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["size", "qwen3-4b", "--page-tokens", "8k"], "--page-tokens '8k' integer"),
        (["serve", "--gpu-memory-utilization", "90%"], "--gpu-memory-utilization '90%' number"),
        (["serve", "--load-format", "gguf"], "--load-format 'gguf' 'auto' 'dummy'"),
    ],
)
def test_a_value_of_another_kind_is_repeated(given: list[str], said: str) -> None:
    result = CLI.invoke(app, given, env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert mentions(result.output, said) and result.output.count("gguf") <= 1
