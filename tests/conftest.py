"""What all tests share. It imports no torch: `make quick` runs tests that need none."""

from __future__ import annotations

import signal

import pytest
from hypothesis import settings

from tests.examples import NIGHTLY

# A run in the background of a shell ignores Ctrl-C, one under nohup the end of its terminal, and so
# would the commands that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# How long an example takes says how busy the machine is.
settings.register_profile("tangram", deadline=None)
settings.register_profile(NIGHTLY, deadline=None)
settings.load_profile("tangram")

# Files that take longest, in this order: a worker that began one last would end alone.
LONG = (
    "page/test_turns.py",
    "page/test_chat_page.py",
    "wire/test_tools.py",
    "wire/test_structured.py",
    "wire/test_trials_process.py",
    "cpu/test_real_model.py",
    "wire/test_trials.py",
    "gpu/test_engine.py",
    "wire/test_demo.py",
    "wire/test_observability.py",
    "wire/test_chat.py",
    "cpu/test_eval.py",
    "cpu/test_measured_modes.py",
    "gpu/test_by_input.py",
    "gpu/test_cards.py",
    "cpu/test_installed.py",
    "cpu/test_llm.py",
    "wire/test_interrupts.py",
    "wire/test_real.py",
    "wire/test_fuzz.py",
    "cpu/test_grammar.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--pictures", action="store_true", help="write docs/pictures/page_*.png")
    parser.addoption("--reverse", action="store_true", help="run tests from the last to the first")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long files first, or all from the last to the first."""
    rank = {name: at for at, name in enumerate(LONG)}
    items.sort(key=lambda item: rank.get("/".join(item.path.parts[-2:]), len(LONG)))
    if config.getoption("reverse"):
        items.reverse()
