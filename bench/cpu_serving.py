"""Start-up and prefill on the CPU, compared with Transformers alone: `python -m bench.cpu_serving`.

Start: from the launch of `tangram serve smollm2` to the first 200 of /health, and to the end of a
first short answer. The other side is a process that imports Transformers, loads the same weights
and generates the same number of tokens.

Prefill: one prompt, from its submission to its first token, against one forward pass of the model
with its own cache.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import torch
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache

from tangram.calibrate.texts import make_texts
from tangram.config import EngineConfig
from tangram.engine.loop import Engine
from tangram.engine.setup.build import engine_of
from tangram.model.load import LoadedModel, load_model
from tangram.types import Event, Request, SamplingParams
from tangram_lab.environment import environment

RESULTS = Path(__file__).parent / "results"
QUESTION = "What is the capital of France?"
ANSWER_TOKENS = 8
ALONE = f"""
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
safe = {{"trust_remote_code": False}}
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], attn_implementation="sdpa", **safe)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], **safe)
messages = [{{"role": "user", "content": {QUESTION!r}}}]
ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
model.generate(**ids, do_sample=False, max_new_tokens={ANSWER_TOKENS})
"""


def start_seconds() -> tuple[float, float]:
    """Seconds from launch to a healthy server, and to the end of its first answer."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    begin = time.perf_counter()
    command = [sys.executable, "-m", "tangram", "serve", "smollm2", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
                healthy = _healthy(client, server) - begin
                client.post(
                    "/v1/chat/completions",
                    json={
                        "model": "smollm2",
                        "messages": [{"role": "user", "content": QUESTION}],
                        "max_tokens": ANSWER_TOKENS,
                        "temperature": 0,
                    },
                ).raise_for_status()
                return healthy, time.perf_counter() - begin
        finally:
            server.terminate()


def _healthy(client: httpx.Client, server: subprocess.Popen[bytes]) -> float:
    while server.poll() is None:
        try:
            if client.get("/health").status_code == 200:
                return time.perf_counter()
        except httpx.TransportError:
            time.sleep(0.02)
    raise SystemExit(f"the server ended with exit code {server.returncode}")


def alone_seconds(loaded: LoadedModel) -> float:
    """Seconds of a process with Transformers alone for the same answer."""
    begin = time.perf_counter()
    model = str(loaded.model.name_or_path)
    subprocess.run([sys.executable, "-c", ALONE, model], check=True, capture_output=True)
    return time.perf_counter() - begin


def engine_prefill_seconds(engine: Engine, prompt: list[int]) -> tuple[float, int]:
    """Seconds from submission to the first token, and the token."""
    events: list[Event] = []
    params = SamplingParams.state_all(temperature=0.0, max_tokens=1, ignore_eos=True)
    begin = time.perf_counter()
    engine.submit(Request("0", tuple(prompt), params, events.append))
    while engine.busy:
        engine.step()
    return time.perf_counter() - begin, events[0].token_ids[0]


def model_prefill_seconds(loaded: LoadedModel, prompt: list[int]) -> tuple[float, int]:
    """Seconds of one forward pass that fills Transformers' own cache, and the likeliest
    next token.
    """
    begin = time.perf_counter()
    with torch.inference_mode():
        out = loaded.model(torch.tensor([prompt]), past_key_values=DynamicCache(), logits_to_keep=1)
    seconds = time.perf_counter() - begin
    return seconds, int(out.logits[0, -1].argmax())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--context", type=int, default=3000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    # An engine packs weights, so Transformers' model is its own.
    loaded, plain = (load_model("smollm2", dtype=options.dtype) for _ in range(2))
    plain.model.set_attn_implementation("sdpa")
    prompt = loaded.tokenizer.encode(make_texts(1, min_characters=8 * options.context)[0])[
        : options.context
    ]
    shared = {"scorer": "keydiff", "kv_cache_gib": 1.0, "enable_prefix_caching": False}
    engines = {
        rho: engine_of(EngineConfig(kv_retention=rho, **shared), loaded) for rho in (1.0, 0.5)
    }
    prefills: dict[str, Callable[[], tuple[float, int]]] = {
        "transformers": lambda: model_prefill_seconds(plain, prompt),
        "tangram, ρ 1.0": lambda: engine_prefill_seconds(engines[1.0], prompt),
        "tangram, ρ 0.5": lambda: engine_prefill_seconds(engines[0.5], prompt),
    }
    seconds: dict[str, list[float]] = {f"prefill {name}": [] for name in prefills}
    seconds |= {
        "start to healthy": [],
        "start to first answer": [],
        "transformers alone to first answer": [],
    }
    for _ in range(options.repeats):
        tokens = {}
        for name, measure in prefills.items():
            taken, tokens[name] = measure()
            seconds[f"prefill {name}"].append(taken)
        if tokens["transformers"] != tokens["tangram, ρ 1.0"]:
            raise SystemExit("the first token differs from Transformers', nothing is reported")
        healthy, answered = start_seconds()
        seconds["start to healthy"].append(healthy)
        seconds["start to first answer"].append(answered)
        seconds["transformers alone to first answer"].append(alone_seconds(loaded))
    report(seconds, options)


def report(seconds: dict[str, list[float]], options: Any) -> None:
    """Print the table and keep the raw figures."""
    table = Table(title=f"start and prefill of {options.context} tokens, {options.dtype}")
    for column in ("what", "s (median)", "spread", "tokens/s"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for name, taken in seconds.items():
        median = statistics.median(taken)
        speed = f"{options.context / median:.0f}" if name.startswith("prefill") else ""
        table.add_row(name, f"{median:.2f}", f"{min(taken):.2f} - {max(taken):.2f}", speed)
    Console().print(table)
    RESULTS.mkdir(exist_ok=True)
    content = {
        "command": "python -m bench.cpu_serving",
        "options": vars(options),
        "environment": environment(),
        "seconds": seconds,
    }
    kind = "" if options.dtype == "float32" else f"-{options.dtype}"
    (RESULTS / f"cpu_serving{kind}.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
