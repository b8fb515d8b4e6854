"""What a streamed token costs the processor: `python -m bench.serving.stream_cost`.

A server of a tiny model with a real tokenizer and template answers streams of clients in processes
of their own. The processor's time of its API processes, and of the engine's, between the first
request and the last token, is divided by the tokens. `--baseline FOLDER` measures the checkout
there in turns with this one.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig

from bench.bare_tokenizer import load_tokenizer
from bench.serving.servers import KINDS, NAME, MeasuredServer, describe_costs, run_server
from bench.serving.streams import ClientCost, Post, StreamClients, StreamedAnswer
from tangram.lab.environment import environment

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


def measure(root: Path, model: Path, streams: int, tokens: int) -> dict[str, Any]:
    """Microseconds of the processor for each token, and tokens a second, at the checkout `root`."""
    options = ["--load-format", "dummy", "--kv-retention", "1.0", "--kv-cache-gib", "0.25"]
    options += ["--threads", "1", "--max-num-seqs", str(streams)]
    variables = {"PYTHONPATH": str(root), "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    log = model / "server.log"
    with run_server(KINDS["tangram"], model, options, log, **variables) as server:
        clients = StreamClients(server.port, min(MOST_CLIENTS, streams))
        try:
            answer(server, clients, streams, 8)  # what is compiled or loaded at its first use
            answers, costs, before, after = answer(server, clients, streams, tokens)
        finally:
            clients.close()
    used = {role: after[role] - before[role] for role in after}
    count = sum(one.completion_tokens for one in answers)
    if count != streams * tokens:
        raise SystemExit(f"{count} tokens came of {streams * tokens}")
    return {
        "engine_us_a_token": 1e6 * used["engine"] / count,
        "tokens_per_s": count / max(one.times_s[-1] for one in answers),
        **describe_costs(used, answers, costs),
    }


def answer(
    server: MeasuredServer, clients: StreamClients, streams: int, tokens: int
) -> tuple[list[StreamedAnswer], list[ClientCost], dict[str, float], dict[str, float]]:
    """So many streams at once; see `StreamClients.answer_all`."""
    body = {
        "model": NAME,
        "prompt": "Say something.",
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return clients.answer_all([Post("/v1/completions", body)] * streams, server.cpu_seconds)


def main() -> None:
    """Measure, keep the figures, print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--tokens", type=int, default=256, help="of each stream")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--baseline", type=Path, help="a checkout of another commit")
    parser.add_argument("-o", "--output", type=Path, default=RESULT)
    options = parser.parse_args()
    roots = {"here": HERE} | ({"baseline": options.baseline} if options.baseline else {})
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        for streams in options.streams:
            found: dict[str, list[Any]] = {name: [] for name in roots}
            for _ in range(options.repeats):
                for name, root in roots.items():
                    found[name].append(
                        measure(root.resolve(), Path(folder), streams, options.tokens)
                    )
            rows += [{"streams": streams, "of": name, "runs": runs} for name, runs in found.items()]
    content = {
        "command": shlex.join(["python", "-m", "bench.serving.stream_cost", *sys.argv[1:]]),
        "environment": environment(),
        "tokens": options.tokens,
        "rows": rows,
    }
    options.output.write_text(json.dumps(content, indent=1) + "\n")
    table = Table(title="microseconds of the processor a token: median (range)")
    for name in ("streams", "of", "API processes", "the engine's process", "tokens/s"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            str(row["streams"]),
            str(row["of"]),
            _spread([run["api_us_a_token"] for run in row["runs"]]),
            _spread([run["engine_us_a_token"] for run in row["runs"]]),
            _spread([run["tokens_per_s"] for run in row["runs"]]),
        )
    Console().print(table)


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.0f} ({min(values):.0f}–{max(values):.0f})"


if __name__ == "__main__":
    main()
