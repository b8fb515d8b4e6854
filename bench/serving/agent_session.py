"""The first token of a late turn: `python -m bench.serving.agent_session`.

A client holds a conversation of `--turns` turns with a server, up to a history of `--tokens`. Then
it sends new texts of `--new` tokens: behind the history, which the server holds, and alone. The
goal is that a token behind the history comes at most 1.2 times as late. `--model smollm2` is the
embedded model, which is made to take more positions than it was trained for: its answers are worth
nothing. Without it a model answers that takes little time, so what is measured is the host's work.
`--before` measures a folder or a commit in turns with this checkout.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import httpx

from bench.serving.servers import KINDS, NAME, run_server
from bench.serving.stream_cost import HERE, ServedModel, checkout, make_model, measure_in_turns
from tangram.model.convert import convert_gguf
from tangram.model.source import EMBEDDED, gguf_file
from tangram.progress import show_progress
from tangram_lab.environment import environment

RESULT = HERE / "bench" / "results" / "agent_session.json"
POSITIONS = 1 << 17
ANSWER_TOKENS, MOST_S = 16, 600.0
# A token each, in the embedded model's tokenizer.
WORDS = ("the", "of", "and", "to", "in", "is", "that", "it")
Message = dict[str, str]


def write_model(folder: Path, name: str | None) -> None:
    """The embedded model or a tiny one, for long conversations."""
    if name == EMBEDDED:
        for file in convert_gguf(gguf_file(EMBEDDED)).iterdir():
            (folder / file.name).symlink_to(file)
    else:
        make_model(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").unlink()
    config["max_position_embeddings"] = POSITIONS
    (folder / "config.json").write_text(json.dumps(config))


def make_text(random: Random, tokens: int) -> str:
    """A text of nearly `tokens` tokens that no other call gives."""
    return " ".join(random.choices(WORDS, k=tokens))


@dataclass
class TimedText:
    """An answer: when its first token came, and its prompt's tokens."""

    text: str = ""
    first_s: float = 0.0
    usage: dict[str, Any] = field(default_factory=dict)


def ask(client: httpx.Client, messages: Sequence[Message]) -> TimedText:
    """The streamed answer to a conversation."""
    body = {
        "model": NAME,
        "messages": list(messages),
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer, begin_s = TimedText(), time.perf_counter()
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            answer.usage = event.get("usage") or answer.usage
            for choice in event["choices"]:
                if content := choice["delta"].get("content"):
                    answer.first_s = answer.first_s or time.perf_counter() - begin_s
                    answer.text += content
        response.raise_for_status()
    return answer


def measure(root: Path, served: ServedModel, log: Path, options: argparse.Namespace) -> Any:
    """Times to first tokens of the server of the checkout `root`."""
    variables = {"PYTHONPATH": str(root), "PYTHONSAFEPATH": "1", **served.variables}
    random, messages, turns_s = Random(0), list[Message](), list[float]()
    with (
        run_server(KINDS["tangram"], served.model, served.options, log, **variables) as server,
        httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=MOST_S) as client,
    ):
        for _ in show_progress(range(options.turns - 1), "Turns of the conversation"):
            text = make_text(random, options.tokens // (options.turns - 1))
            messages.append({"role": "user", "content": text})
            answer = ask(client, messages)
            turns_s.append(answer.first_s)
            messages.append({"role": "assistant", "content": answer.text})
        found: dict[str, list[TimedText]] = {"behind the history": [], "alone": []}
        for _ in range(options.repeats):
            for name, before in zip(found, (messages, []), strict=True):
                new = {"role": "user", "content": make_text(random, options.new)}
                found[name].append(ask(client, [*before, new]))
    return {
        "turns_ttft_s": turns_s,
        "ttft_ms": {
            name: [1e3 * answer.first_s for answer in answers] for name, answers in found.items()
        },
        "usage": {name: answers[-1].usage for name, answers in found.items()},
    }


def main() -> None:
    """Measure, keep the figures, print them."""
    options = _parse()
    with tempfile.TemporaryDirectory() as name, ExitStack() as opened:
        folder = Path(name)
        write_model(folder, options.model)
        given = ["--kv-retention", str(options.kv_retention), *options.options]
        if options.model is None:
            given += ["--load-format", "dummy", "--threads", "1"]
        served = ServedModel(str(folder), given)
        roots = {"here": HERE}
        if options.before:
            roots["before"] = opened.enter_context(checkout(options.before))
        run = partial(measure, served=served, log=folder / "server.log", options=options)
        found = measure_in_turns(roots, run, options.rounds)
    content = {
        "command": shlex.join(["python", "-m", "bench.serving.agent_session", *sys.argv[1:]]),
        "environment": environment(),
        "rounds": found,
    }
    options.output.write_text(json.dumps(content, indent=1) + "\n")
    for of, rounds in found.items():
        for row in rounds:
            behind, alone = (statistics.median(times) for times in row["ttft_ms"].values())
            print(
                f"{of}: behind {row['usage']['behind the history']['prompt_tokens']:,} tokens "
                f"{behind:.1f} ms, alone {alone:.1f} ms, {behind / alone:.2f} ×"
            )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=[EMBEDDED])
    parser.add_argument("--tokens", type=int, default=60_000, help="of the history")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--new", type=int, default=512, help="tokens of a new text")
    parser.add_argument("--repeats", type=int, default=7, help="new texts of each kind")
    parser.add_argument("--rounds", type=int, default=1, help="servers of each checkout")
    parser.add_argument("--kv-retention", type=float, default=0.5)
    parser.add_argument("--before", help="a commit, or the folder of a checkout")
    parser.add_argument("--options", nargs=argparse.REMAINDER, default=[], help="of the servers")
    parser.add_argument("-o", "--output", type=Path, default=RESULT)
    return parser.parse_args()


if __name__ == "__main__":
    main()
