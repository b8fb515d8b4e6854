"""The commands that docs/performance.md prints are those that the programs take."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from importlib import import_module
from typing import Any

import pytest

from bench.render.page import DOCS
from tangram_lab.baselines.compared_schedules import KernelVariant

PAGE = (DOCS / "performance.md").read_text(encoding="utf-8")
BENCH = sorted(set(re.findall(r"`(?:\w+=\S+ )?python -m (bench\.[^`]+)`", PAGE)))
TAKES_ALL = "bench.kernels.all"  # it hands on what it does not know


class Parsed(Exception):
    """Ends a program once it has read its options."""


def parse(command: str, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """The options that the program of a command reads; it is not run."""
    program, *given = shlex.split(command)
    read = argparse.ArgumentParser.parse_known_args

    def stop(parser: argparse.ArgumentParser, *rest: Any, **named: Any) -> Any:
        options, unknown = read(parser, *rest, **named)
        assert program == TAKES_ALL or not unknown, f"{program} does not know {unknown}"
        raise Parsed(options)

    if program == "bench.kernels.plots":
        pytest.importorskip("matplotlib", reason="plots need matplotlib, which is no dependency")
    module = import_module(program)
    if hasattr(module, "__path__"):
        module = import_module(f"{program}.__main__")
    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", stop)
    monkeypatch.setattr(sys, "argv", [program, *given])
    with pytest.raises(Parsed) as parsed:
        module.main()
    found: argparse.Namespace = parsed.value.args[0]
    return found


def test_the_page_prints_commands() -> None:
    assert len(BENCH) > 12


@pytest.mark.parametrize("command", BENCH, ids=lambda command: command[:60])
def test_a_printed_benchmark_takes_its_options(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = parse(command, monkeypatch)
    for text in getattr(options, "planners", ()):
        KernelVariant.parse(text)


def test_what_a_program_does_not_take_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match="--atomic"):
        parse("bench.kernels.pat --atomic", monkeypatch)
