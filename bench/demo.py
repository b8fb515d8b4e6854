"""The demo: start a server, talk to it about a long document, and show what each turn reused and held.

Run it with `make demo` or `python bench/demo.py`. It needs no network and no GPU: the model is the embedded one. The
exit code is 0 only if every turn was answered, later turns reused the cache, and the cache was smaller than an
uncompressed one.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
from openai import OpenAI, OpenAIError
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

MODEL = "smollm2"
KV_RETENTION = 0.5
MAX_TOKENS = 80
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 20.0
DOCUMENT = Path(__file__).with_name("demo_document.md")
# A model of 135 M parameters answers well in one sentence and loses itself in the second.
STOP = ". "
QUESTIONS = (
    "Who is the head keeper?",
    "Tell me about the cat.",
    "When was the observatory built, and by whom?",
    "How high is the hill, and which village lies below it?",
    "Who drove the sledge, and what did he bring?",
)


class DemoError(Exception):
    """The demo cannot go on; the message says why."""


@dataclass(frozen=True)
class Turn:
    """One question, its answer and what the server reported about it."""

    question: str
    answer: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    kv_bytes: int
    kv_bytes_uncompressed: int
    first_token_s: float
    decode_s: float

    @property
    def kv_share(self) -> float:
        """KV bytes held, as a fraction of what an uncompressed cache would hold."""
        return self.kv_bytes / self.kv_bytes_uncompressed

    @property
    def tokens_per_s(self) -> float:
        """Decode speed: the first token is the prompt's doing."""
        return (self.completion_tokens - 1) / self.decode_s if self.decode_s > 0 else 0.0


@contextmanager
def running_server(console: Console) -> Iterator[str]:
    """A server process on a free port, healthy; terminated whatever happens. Gives its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tangram", "serve", MODEL, "--served-model-name", MODEL]
    options = ["--kv-retention", str(KV_RETENTION), "--host", "127.0.0.1", "--port", str(port)]
    console.print(f"[dim]$ {' '.join(['python', *command[1:], *options])}[/dim]")
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen([*command, *options], stdout=log, stderr=subprocess.STDOUT)
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_healthy(url, process)
            yield url
            if process.poll() is not None:
                raise DemoError(f"the server ended with code {process.returncode} during the conversation")
        except (DemoError, OpenAIError):
            log.seek(0)
            console.print("the server's last words:", style="dim")
            console.print("".join(log.readlines()[-30:]), markup=False, highlight=False)
            raise
        finally:
            stop(process)


def wait_until_healthy(url: str, process: subprocess.Popen[bytes]) -> None:
    """Returns once /health says 200; raises `DemoError` if the process ends or takes too long."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise DemoError(f"the server ended with code {process.returncode} before it was healthy")
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise DemoError(f"the server was not healthy after {START_TIMEOUT_S:.0f} s")


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the server, kindly first."""
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def ask(client: OpenAI, history: list[Any], question: str) -> Turn:
    """Stream the answer to the last message of `history`. Raises `DemoError` if the server sends no usage."""
    start_s = time.monotonic()
    stream = client.chat.completions.create(
        model=MODEL,
        messages=history,
        temperature=0,
        max_tokens=MAX_TOKENS,
        stop=STOP,
        stream=True,
        stream_options={"include_usage": True},
    )
    pieces: list[tuple[float, str]] = []
    usage = None
    for chunk in stream:
        usage = chunk.usage or usage
        pieces += [(time.monotonic(), choice.delta.content) for choice in chunk.choices if choice.delta.content]
    if usage is None or usage.prompt_tokens_details is None or not pieces:
        raise DemoError(f"no answer or no usage for the question {question!r}")
    extra = usage.model_extra or {}
    return Turn(
        question=question,
        answer="".join(text for _, text in pieces).strip().removesuffix(".") + ".",
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.prompt_tokens_details.cached_tokens or 0,
        completion_tokens=usage.completion_tokens,
        kv_bytes=extra["kv_bytes"],
        kv_bytes_uncompressed=extra["kv_bytes_uncompressed"],
        first_token_s=pieces[0][0] - start_s,
        decode_s=pieces[-1][0] - pieces[0][0],
    )


def converse(client: OpenAI, console: Console) -> list[Turn]:
    """The whole conversation: the document comes with the first question, the later ones build on it."""
    history: list[Any] = []
    turns: list[Turn] = []
    for question in QUESTIONS:
        content = question if turns else f"{DOCUMENT.read_text()}\n\n{question}"
        history.append({"role": "user", "content": content})
        turn = ask(client, history, question)
        history.append({"role": "assistant", "content": turn.answer})
        turns.append(turn)
        show(turn, len(turns), console)
    return turns


def show(turn: Turn, number: int, console: Console) -> None:
    """One turn, as it ends."""
    console.print(Panel(Text(turn.answer), title=f"{number}. {turn.question}", title_align="left"))
    console.print(
        f"  reused {turn.cached_tokens:,} of {turn.prompt_tokens:,} prompt tokens · "
        f"first token {turn.first_token_s:.2f} s · {turn.tokens_per_s:.1f} tokens/s\n"
        f"  KV cache {turn.kv_bytes / 2**20:.1f} MiB, uncompressed {turn.kv_bytes_uncompressed / 2**20:.1f} MiB: "
        f"{turn.kv_share:.0%}\n"
    )


def summary(turns: Sequence[Turn]) -> Table:
    """All turns side by side."""
    table = Table(title=f"{MODEL}, --kv-retention {KV_RETENTION}: {len(turns)} turns over one document")
    for name in (
        "turn",
        "prompt\ntokens",
        "reused",
        "KV held\nMiB",
        "uncompressed\nMiB",
        "held",
        "first\ntoken s",
        "tokens/s",
    ):
        table.add_column(name, justify="right")
    for number, turn in enumerate(turns, 1):
        table.add_row(
            str(number),
            f"{turn.prompt_tokens:,}",
            f"{turn.cached_tokens:,}",
            f"{turn.kv_bytes / 2**20:.1f}",
            f"{turn.kv_bytes_uncompressed / 2**20:.1f}",
            f"{turn.kv_share:.0%}",
            f"{turn.first_token_s:.2f}",
            f"{turn.tokens_per_s:.1f}",
        )
    return table


def problems(turns: Sequence[Turn]) -> list[str]:
    """What did not go as promised, in words; empty when all is well."""
    found = []
    for number, turn in enumerate(turns, 1):
        if number > 1 and turn.cached_tokens == 0:
            found.append(f"turn {number} reused nothing of the {turn.prompt_tokens} tokens before it")
        if turn.kv_bytes >= turn.kv_bytes_uncompressed:
            found.append(f"turn {number} holds {turn.kv_bytes} KV bytes, not below {turn.kv_bytes_uncompressed}")
    return found


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def main() -> int:
    """Run the demo; returns the exit code."""
    signal.signal(signal.SIGTERM, _exit_on_signal)  # so that the server is stopped then, too
    console = Console()
    try:
        with running_server(console) as url:
            turns = converse(OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), console)
    except (DemoError, OpenAIError) as error:
        console.print(f"the demo failed: {error}", style="red", markup=False)
        return 1
    console.print(summary(turns))
    for problem in problems(turns):
        console.print(problem, style="red", markup=False)
    return 1 if problems(turns) else 0


if __name__ == "__main__":
    sys.exit(main())
