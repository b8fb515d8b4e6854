"""Agents of other people complete a task on a server, told of it by the lines of docs/clients.md.

`make clients` brings the light ones, `make clients-nightly` all.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from .conftest import wait_until
from .scripted_agent import (
    DONE,
    ENDLESS,
    FILES,
    PASSED,
    RIGHT,
    TASK,
    WRONG,
    AgentServer,
    ScriptedTurn,
    run_agent_server,
)

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/clients.md").read_text(encoding="utf-8")
ADDRESS, MODEL = "http://127.0.0.1:8000", "my-model"
CLIENTS, BUILD = ROOT / "tests/clients", ROOT / "build"
LIGHT, AIDER, AGENTS = (BUILD / f"{name}-venv/bin" for name in ("clients", "aider", "agents"))
PROGRAMS, NODE = BUILD / "programs-node/node_modules/.bin", BUILD / "clients-node/node_modules"
END_S = 120
MESSAGES = "/v1/messages"


def use_tools(*calls: tuple[str, Mapping[str, Any]]) -> list[ScriptedTurn]:
    """The turns of an agent that reads, edits and tests by these calls."""
    says = ("I read the file.", "The sign is wrong.", "I run its test.")
    return [
        *(ScriptedTurn(text, [call]) for text, call in zip(says, calls, strict=True)),
        ScriptedTurn(DONE),
    ]


def mend_by_task_tools(_: Path) -> list[ScriptedTurn]:
    return use_tools(
        ("read_file", {"path": "sum.py"}),
        ("edit_file", {"path": "sum.py", "old": WRONG, "new": RIGHT}),
        ("run_test", {"path": "test_sum.py"}),
    )


def mend_as_claude_code(folder: Path) -> list[ScriptedTurn]:
    file = {"file_path": f"{folder}/sum.py"}
    return use_tools(
        ("Read", file),
        ("Edit", file | {"old_string": WRONG, "new_string": RIGHT}),
        ("Bash", {"command": "python3 test_sum.py"}),
    )


def mend_as_continue(folder: Path) -> list[ScriptedTurn]:
    path = f"{folder}/sum.py"
    return use_tools(
        ("Read", {"filepath": path}),
        ("Edit", {"file_path": path, "old_string": WRONG, "new_string": RIGHT}),
        ("Bash", {"command": "python3 test_sum.py"}),
    )


def mend_as_codex(_: Path) -> list[ScriptedTurn]:
    commands = ("cat sum.py", "sed -i 's/a - b/a + b/' sum.py", "python3 test_sum.py")
    return use_tools(*(("exec_command", {"cmd": command}) for command in commands))


def mend_as_opencode(folder: Path) -> list[ScriptedTurn]:
    file = {"filePath": f"{folder}/sum.py"}
    return use_tools(
        ("read", file),
        ("edit", file | {"oldString": WRONG, "newString": RIGHT}),
        ("bash", {"command": "python3 test_sum.py", "description": "Run the test"}),
    )


def mend_as_aider(_: Path) -> list[ScriptedTurn]:
    """It has no tools: it reads edits in answers, and runs the test after each."""

    def edit(says: str, old: str, new: str) -> ScriptedTurn:
        marks = f"<<<<<<< SEARCH\n{old}=======\n{new}>>>>>>> REPLACE"
        return ScriptedTurn(f"{says}\n\nsum.py\n```python\n{marks}\n```")

    first, second = "    return a * b + 1\n", "    return b - a\n"
    return [
        edit("It is this.", WRONG, first),
        edit("Or this.", first, second),
        edit(DONE, second, RIGHT),
    ]


@dataclass(frozen=True)
class Program:
    """A program: the `section` of the page with its lines, and the `command` to be run then.

    `needs` is a folder with its commands, or one of its files. `turns` are what its model says in a
    folder. Its prompts for turns have the `sign`. `refused` are the requests that are answered 4xx.
    """

    section: str
    needs: Path
    command: str
    turns: Callable[[Path], list[ScriptedTurn]] = mend_by_task_tools
    sign: str = "<tools>"
    refused: frozenset[tuple[str, str, int]] = frozenset()


def task_of(library: str, section: str, python: Path, **fields: Any) -> Program:
    """The agent of tests/clients/task.py."""
    command = shlex.join([str(python), str(CLIENTS / "task.py"), library])
    return Program(section, python, f'{command} "$TASK"', **fields)


def node_task_of(library: str, section: str, **fields: Any) -> Program:
    """The agent of tests/clients/task.mjs. Node looks for packages beside the place it runs in."""
    command = f"ln -s {NODE} node_modules && node --input-type=module - {library}"
    return Program(section, NODE / "openai", f'{command} "$TASK" < {CLIENTS}/task.mjs', **fields)


OPENAI, ANTHROPIC = "Libraries of OpenAI's form", "Anthropic's clients"
UNTHREADED = frozenset({("POST", MESSAGES, 400)})
LIGHT_ONES = {
    "openai": task_of("openai_chat", OPENAI, Path(sys.executable)),
    "openai responses": task_of("openai_responses", OPENAI, Path(sys.executable)),
    "anthropic": task_of("anthropic", ANTHROPIC, Path(sys.executable), refused=UNTHREADED),
    "openai node": node_task_of("openai_node", OPENAI),
    "anthropic node": node_task_of("anthropic_node", ANTHROPIC, refused=UNTHREADED),
}
HEAVY_ONES = {
    "claude code": Program(
        "Claude Code",
        PROGRAMS,
        'claude -p "$TASK" --allowedTools Read,Edit,Bash',
        mend_as_claude_code,
        refused=frozenset({("HEAD", "/api/hello", 404)}),
    ),
    "codex": Program(
        "Codex",
        PROGRAMS,
        'codex exec --dangerously-bypass-approvals-and-sandbox "$TASK"',
        mend_as_codex,
    ),
    "opencode": Program("opencode", PROGRAMS, 'opencode run "$TASK"', mend_as_opencode),
    "continue": Program("Continue", PROGRAMS, 'cn --auto -p "$TASK"', mend_as_continue),
    "aider": Program(
        "aider",
        AIDER,
        'aider --yes-always --auto-test --test-cmd "python3 test_sum.py" --message "$TASK" sum.py',
        mend_as_aider,
        sign="SEARCH/REPLACE block",
    ),
    "llm": Program("llm", LIGHT, f'llm --functions {CLIENTS}/task_tools.py "$TASK"'),
    "litellm": task_of("litellm", OPENAI, LIGHT / "python"),
    "openai agents": task_of("openai_agents", OPENAI, AGENTS / "python"),
    "langgraph": task_of("langgraph", OPENAI, AGENTS / "python"),
}


def programs(**light: Program) -> Any:
    """Runs a test with these light programs, and nightly with all heavy ones."""
    nightly = [
        pytest.param(one, id=name, marks=pytest.mark.nightly) for name, one in HEAVY_ONES.items()
    ]
    return pytest.mark.parametrize(
        "program", [*(pytest.param(one, id=name) for name, one in light.items()), *nightly]
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentServer]:
    with run_agent_server(tmp_path_factory.mktemp("agent"), MODEL) as running:
        yield running


def lines_of(section: str) -> str:
    """The block below a heading of the page."""
    found = re.search(rf"^## {re.escape(section)}\n.*?^```\n(.*?)^```$", PAGE, re.M | re.S)
    assert found is not None, section
    return found[1]


@contextmanager
def run_program(
    program: Program, task: str, server: AgentServer, folder: Path
) -> Iterator[subprocess.Popen[str]]:
    """The program at work in a new repository at `folder`, in a group of processes of its own."""
    if not program.needs.exists():
        pytest.skip("make clients-nightly brings this program, make clients a light one")
    (home := folder.parent / "home").mkdir()
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(text)
    subprocess.run(["git", "init", "--quiet", folder], check=True)
    server.agent.turns, server.agent.sign = program.turns(folder), program.sign
    server.agent.served.clear()
    server.http_record.exchanges.clear()
    script = f"{lines_of(program.section).replace(ADDRESS, server.url)}\n{program.command}"
    near = program.needs if program.needs.is_dir() else program.needs.parent
    names = {
        f"GIT_{role}_{what}": "me" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
    }
    variables = {"HOME": str(home), "TASK": task, "PYTHONDONTWRITEBYTECODE": "1", **names}
    variables["PATH"] = f"{near}:{os.environ['PATH']}"
    with subprocess.Popen(
        ["bash", "-ec", script],
        cwd=folder,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


@programs(**LIGHT_ONES)
def test_a_program_completes_its_task(
    program: Program, server: AgentServer, tmp_path: Path
) -> None:
    folder = tmp_path / "work"
    with run_program(program, TASK, server, folder) as process:
        printed, _ = process.communicate(timeout=END_S)
    record = server.http_record.exchanges
    told = f"{printed}\n{[(each.method, each.path, each.status) for each in record]}"
    assert process.returncode == 0 and DONE in printed, told
    assert (folder / "sum.py").read_text() == FILES["sum.py"].replace(WRONG, RIGHT), told
    _, *later = server.agent.served
    assert PASSED in printed + server.agent.prompt(later[-1]), told
    assert len(later) >= 2, told
    for turn in later:
        assert turn.usage.cached_tokens > turn.usage.prompt_tokens / 2, told
    refused = {(each.method, each.path, each.status) for each in record if each.status >= 400}
    assert refused == program.refused, told
    asked = [
        json.loads(each.body) for each in record if each.status == 200 and each.method == "POST"
    ]
    assert all(body["stream"] for body in asked if "tools" in body), told


@pytest.mark.nightly
def test_claude_code_loads_a_tool_that_it_has_deferred(server: AgentServer, tmp_path: Path) -> None:
    find = ("ToolSearch", {"query": "select:WebFetch"})
    turns = [ScriptedTurn("I look for it.", [find]), ScriptedTurn(DONE)]
    program = replace(HEAVY_ONES["claude code"], turns=lambda _: turns)
    with run_program(program, TASK, server, tmp_path / "work") as process:
        printed, _ = process.communicate(timeout=END_S)
    assert process.returncode == 0 and DONE in printed, printed
    first, second = server.agent.served[-2:]
    definition = '"function": {"name": "WebFetch", "description"'
    assert definition not in server.agent.prompt(first)
    assert server.agent.prompt(second).count(definition) == 1
    assert second.usage.cached_tokens > 0.95 * first.usage.prompt_tokens


@programs(openai=LIGHT_ONES["openai"], anthropic_node=LIGHT_ONES["anthropic node"])
def test_a_program_that_is_ended_leaves_nothing_behind(
    program: Program, server: AgentServer, tmp_path: Path
) -> None:
    with run_program(program, ENDLESS, server, tmp_path / "work") as process:
        enough = server.engine.stats().generated_tokens + 50  # more than a title has
        wait_until(
            lambda: server.engine.stats().generated_tokens > enough, "no answer comes", END_S
        )
        assert process.poll() is None
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
    wait_until(lambda: server.engine.stats().running == 0, "its request still runs")
    wait_until(lambda: server.engine.stats().pages_held == 0, "pages are still held")
    assert server.engine.stats().waiting == 0
    assert all(each.status < 500 for each in server.http_record.exchanges)


def test_the_page_has_the_pinned_versions_and_nothing_that_is_not_tried() -> None:
    lists = [
        "requirements.txt",
        "package.json",
        *CLIENTS.glob("programs/*"),
        ROOT / "constraints.txt",
    ]
    pins = "\n".join((CLIENTS / path).read_text() for path in lists)
    (table,) = re.findall(r"^\|---.*\n((?:\|.*\n)+)", PAGE, re.M)
    for row in table.splitlines():
        for version in row.split("|")[2].strip().split(", "):
            assert f"=={version}\n" in pins or f'"{version}"' in pins, row
    tried = {one.section for one in (LIGHT_ONES | HEAVY_ONES).values()}
    assert set(re.findall(r"^## (.*)$", PAGE, re.M)) == tried
