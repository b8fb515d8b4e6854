"""What a streamed token costs: `python -m bench.serving.stream_cost`.

A server answers streams of clients in processes of their own: of a tiny model with a real tokenizer
and template, or of `--model NAME`. The processor's time between the first request and the last
token is divided by the tokens, apart for the API processes and the engine's. Beside it stand the
time to the first token and the memory (PSS, which shares out pages that processes have in common).
`--before` measures a folder or a commit in turns with this checkout, on the same machine.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig

from bench.bare_tokenizer import load_tokenizer
from bench.serving.servers import KINDS, NAME, MeasuredServer, describe_costs, run_server
from bench.serving.streams import ClientCost, Post, StreamClients, StreamedAnswer
from tangram_lab.environment import environment

HERE = Path(__file__).parents[2]
RESULT = HERE / "bench" / "results" / "stream_cost.json"
MOST_CLIENTS = 2


def make_model(folder: Path) -> None:
    """A model that takes little time, with the embedded model's tokenizer and template."""
    tokenizer = load_tokenizer("smollm2")
    tokenizer.save_pretrained(folder)
    LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=2,
    ).save_pretrained(folder)


@dataclass(frozen=True)
class ServedModel:
    """A model as `tangram serve` takes it, and the options and variables of its server."""

    model: str
    options: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)


def serve_tiny(folder: Path) -> ServedModel:
    """A model that takes little time, with one thread."""
    make_model(folder)
    options = ["--load-format", "dummy", "--kv-retention", "1.0", "--kv-cache-gib", "0.25"]
    return ServedModel(str(folder), [*options, "--threads", "1"], {"OMP_NUM_THREADS": "1"})


def measure(
    root: Path, served: ServedModel, log: Path, streams: int, tokens: int
) -> dict[str, Any]:
    """What the server of the checkout `root` costs."""
    options = [*served.options, "--max-num-seqs", str(streams)]
    variables = {"PYTHONPATH": str(root), "PYTHONSAFEPATH": "1", **served.variables}
    with run_server(KINDS["tangram"], served.model, options, log, **variables) as server:
        clients = StreamClients(server.port, min(MOST_CLIENTS, streams))
        try:
            answer(server, clients, streams, 8)  # what is compiled or loaded at its first use
            answers, costs, before, after = answer(server, clients, streams, tokens)
        finally:
            clients.close()
        memory = server.memory_bytes()
    used = {role: after[role] - before[role] for role in after}
    count = sum(one.completion_tokens for one in answers)
    if count != streams * tokens:
        raise SystemExit(f"{count} tokens came of {streams * tokens}")
    return {
        "engine_us_a_token": 1e6 * used["engine"] / count,
        "tokens_per_s": count / max(one.times_s[-1] for one in answers),
        "ttft_ms": 1e3 * statistics.median(one.times_s[0] for one in answers),
        "memory_mib": {role: held / 2**20 for role, held in memory.items()},
        **describe_costs(used, answers, costs),
    }


def answer(
    server: MeasuredServer, clients: StreamClients, streams: int, tokens: int
) -> tuple[list[StreamedAnswer], list[ClientCost], dict[str, float], dict[str, float]]:
    """So many streams at once; see `StreamClients.answer_all`."""
    body = {
        "model": NAME,
        "prompt": f"Say something in {tokens} words.",
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return clients.answer_all([Post("/v1/completions", body)] * streams, server.cpu_seconds)


@contextmanager
def checkout(before: str) -> Iterator[Path]:
    """The folder `before`, or the files of the commit of that name while the context lasts.

    Raises `SystemExit` if it is neither.
    """
    if Path(before).is_dir():
        yield Path(before).resolve()
        return
    with tempfile.TemporaryDirectory(prefix="before-") as folder:
        packed = Path(folder) / "files.tar"
        git = ["git", "-C", str(HERE), "archive", "--output", str(packed), before, "tangram"]
        if subprocess.run(git).returncode:
            raise SystemExit(f"{before} is neither a folder nor a commit")
        with tarfile.open(packed) as files:
            files.extractall(folder, filter="data")
        yield Path(folder)


def measure_in_turns(
    roots: Mapping[str, Path], run: Callable[[Path], dict[str, Any]], repeats: int
) -> dict[str, list[dict[str, Any]]]:
    """The runs at each root; every repeat measures all, by turns from the first and the last."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in roots}
    for number in range(repeats):
        for name in list(roots)[:: -1 if number % 2 else 1]:
            found[name].append(run(roots[name]))
    return found


def main() -> None:
    """Measure, keep the figures, print a table."""
    options = _parse()
    rows = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
        served = ServedModel(options.model) if options.model else serve_tiny(Path(folder))
        roots = {"here": HERE}
        if options.before:
            roots["before"] = opened.enter_context(checkout(options.before))
        log = Path(folder) / "server.log"
        for root in roots.values():
            measure(root, served, log, 1, 8)  # compiles what no server there has compiled yet
        for streams in options.streams or ([1] if options.model else [1, 8, 64]):
            run = partial(measure, served=served, log=log, streams=streams, tokens=options.tokens)
            found = measure_in_turns(roots, run, options.repeats)
            rows += [{"streams": streams, "of": name, "runs": runs} for name, runs in found.items()]
    content = {
        "command": shlex.join(["python", "-m", "bench.serving.stream_cost", *sys.argv[1:]]),
        "environment": environment(),
        "tokens": options.tokens,
        "rows": rows,
    }
    options.output.write_text(json.dumps(content, indent=1) + "\n")
    Console(width=150).print(make_table(rows))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="what `tangram serve` takes, smollm2 for one; a tiny one")
    parser.add_argument(
        "--streams", type=int, nargs="+", help="1, 8 and 64; of a --model one, a single user's"
    )
    parser.add_argument("--tokens", type=int, default=256, help="of each stream")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--before", help="a commit, or the folder of a checkout")
    parser.add_argument("-o", "--output", type=Path, default=RESULT)
    return parser.parse_args()


def make_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A row for each number of streams and checkout."""
    table = Table(title="what a streamed token costs: median (range)")
    columns: dict[str, Callable[[Any], float]] = {
        "API processes, µs a token": lambda run: run["api_us_a_token"],
        "the engine's process": lambda run: run["engine_us_a_token"],
        "tokens/s": lambda run: run["tokens_per_s"],
        "first token, ms": lambda run: run["ttft_ms"],
        "API processes, MiB": lambda run: run["memory_mib"]["api"],
        "the engine's, MiB": lambda run: run["memory_mib"]["engine"],
    }
    for name in ("streams", "of", *columns):
        table.add_column(name, justify="right")
    for row in rows:
        cells = (_spread([read(run) for run in row["runs"]]) for read in columns.values())
        table.add_row(str(row["streams"]), row["of"], *cells)
    return table


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.0f} ({min(values):.0f}–{max(values):.0f})"


if __name__ == "__main__":
    main()
