"""What all tests share. It imports no torch: `make quick` runs tests that need none."""

from __future__ import annotations

import os
import signal
import ssl
import sys
from collections.abc import Iterator
from functools import cache

import pytest
import typer.testing
from hypothesis import settings

from tests.examples import NIGHTLY
from tests.forking import run_fork_server

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

# Files that take longest, in this order: a worker that began one last would end alone. The first
# compiles the CPU kernels of one dtype where no cache has them, the second those of another. Two
# that began with the same would both compile.
LONG = (
    "web/test_turns.py",
    "gpu/test_engine.py",
    "wire/test_demo.py",
    "web/test_chat_page.py",
    "cpu/test_families.py",
    "cpu/test_several_scorers.py",
    "wire/test_clients.py",
    "wire/test_load_tool.py",
    "gpu/test_cards.py",
    "wire/test_structured.py",
    "web/test_compare.py",
    "cpu/test_ablation.py",
    "gpu/test_kept_positions.py",
    "wire/test_fuzz.py",
    "wire/test_chat.py",
    "cpu/test_installed.py",
    "wire/test_starting.py",
    "cpu/test_real_model.py",
    "gpu/test_kept_first.py",
    "wire/test_observability.py",
    "wire/test_tools.py",
    "gpu/test_rows_apart.py",
    "cpu/test_speculation.py",
    "wire/test_drafted_tokens.py",
    "gpu/test_decode.py",
    "wire/test_interrupts.py",
    "cpu/test_speculative_sampling.py",
    "gpu/test_fused_causal.py",
    "wire/test_process.py",
    "cpu/test_eval_quick.py",
    "cpu/test_eval.py",
    "gpu/test_draft_model.py",
    "gpu/test_rehearsal.py",
    "cpu/test_kept_positions.py",
    "web/test_accessible.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--pictures", action="store_true", help="write docs/pictures/{page_*,learn}.png"
    )
    parser.addoption("--reverse", action="store_true", help="run tests from the last to the first")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long files first, or all from the last to the first."""
    rank = {name: at for at, name in enumerate(LONG)}
    items.sort(key=lambda item: rank.get("/".join(item.path.parts[-2:]), len(LONG)))
    if config.getoption("reverse"):
        items.reverse()


@pytest.fixture(scope="session", autouse=True)
def _built_once() -> Iterator[None]:
    """Typer's runner builds all commands for every invocation, and each HTTP client reads all
    certificates, which takes longer than most tests run.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.testing, "_get_command", cache(typer.main.get_command))
        patch.setattr(ssl, "create_default_context", cache(ssl.create_default_context))
        yield


@pytest.fixture(scope="session")
def python() -> Iterator[list[str]]:
    """A command like `sys.executable` for tests whose subject is not the start of a process."""
    if os.environ.get("OMP_NUM_THREADS") != "1":
        # Torch starts OpenMP's other threads when it is imported, and a fork would lack them.
        yield [sys.executable]
        return
    with run_fork_server(
        "tangram.cli",
        "tangram.engine.llm",
        "tangram.serve.http",
        "transformers.generation.utils",
        "transformers.models.llama.modeling_llama",
        "numba.core.inline_closurecall",  # brings what numba reads compiled code with
    ) as command:
        yield command
