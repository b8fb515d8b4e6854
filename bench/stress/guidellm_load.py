"""GuideLLM against a server of the embedded model, without a network.

Run it by `make load` or `python -m bench.stress.guidellm_load`. A fixed number of conversations of
generated text run at once, streamed. No request may fail, and afterwards no page may be held,
although GuideLLM disconnects running requests at the end. It is installed in build/load-venv, by
`make load`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.stress.server import MODEL, ServerError, start_server, surroundings
from tangram.model.load import load_model

ROOT = Path(__file__).parents[2]
GUIDELLM = ROOT / "build" / "load-venv" / "bin" / "guidellm"
RESULT = ROOT / "bench" / "results" / "http_load.json"
SERVER_OPTIONS = ("--kv-retention", "0.5")
SETTLED_WITHIN_S = 30.0


class LoadError(Exception):
    """The generator could not run, or one of its requests failed; the message says which."""


def guidellm(url: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Raises `LoadError` if it does not end well."""
    if not GUIDELLM.exists():
        raise LoadError(f"there is no {GUIDELLM}: `make load` puts it there")
    load_model(MODEL).tokenizer.save_pretrained(folder / "tokenizer")
    report, count = folder / "report.json", options.requests
    command = [
        str(GUIDELLM),
        "run",
        "--disable-progress",
        "--backend",
        f"kind=openai_http,target={url},model={MODEL},request_format=/v1/chat/completions",
        "--tokenizer",
        f"kind=hf_auto,model={folder / 'tokenizer'}",
        "--profile",
        f"kind=concurrent,streams={options.streams}",
        "--constraint",
        f"kind=max_duration,seconds={options.seconds}",
        *(("--constraint", f"kind=max_requests,count={count}") if count else ()),
        "--data",
        f"kind=synthetic_text,prompt_tokens={options.prompt_tokens},output_tokens={options.output_tokens},turns={options.turns}",
        "--output",
        f"kind=json,path={report}",
        "--output",
        "kind=console",
    ]
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    ended = subprocess.run(command, cwd=folder, env=os.environ | offline, check=False)
    if ended.returncode != 0 or not report.exists():
        raise LoadError(f"GuideLLM ended with code {ended.returncode}")
    loaded: dict[str, Any] = json.loads(report.read_text())
    return loaded


def summary(report: dict[str, Any]) -> dict[str, Any]:
    """The published part of a report; times in ms.

    Raises `LoadError` if a request failed or none was answered.
    """
    (benchmark,) = report["benchmarks"]
    metrics = benchmark["metrics"]
    totals = metrics["request_totals"]
    if totals["errored"]:
        first = benchmark["requests"]["errored"][0]["info"].get("error")
        raise LoadError(
            f"{totals['errored']} of {totals['total']} requests failed, the first with: {first}"
        )
    if not totals["successful"]:
        raise LoadError(f"no request was answered in {benchmark['duration']:.0f} s")

    def mean(name: str) -> float:
        return float(metrics[name]["successful"]["mean"])

    def percentiles(name: str) -> dict[str, float]:
        found = metrics[name]["successful"]["percentiles"]
        return {key: found[key] for key in ("p50", "p90", "p99")}

    return {
        "answered": totals["successful"],
        "failed": totals["errored"],
        "cut_at_the_end": totals["incomplete"],
        "requests_per_s": mean("requests_per_second"),
        "output_tokens_per_s": mean("output_tokens_per_second"),
        "ttft_ms": percentiles("time_to_first_token_ms"),
        "inter_token_ms": percentiles("inter_token_latency_ms"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=int, default=int(os.environ.get("LOAD_SECONDS", "60")))
    parser.add_argument(
        "--requests", type=int, help="end after so many requests, if that is sooner"
    )
    parser.add_argument("--streams", type=int, default=4, help="conversations at a time")
    parser.add_argument("--prompt-tokens", type=int, default=256, help="new tokens of a turn")
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("-o", "--output", type=Path, default=RESULT)
    options = parser.parse_args()
    where = surroundings()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as log:
        try:
            with start_server(SERVER_OPTIONS, log) as server:
                report = guidellm(server.url, Path(folder), options)
                found = summary(report)
                server.check_health()
                gauges = server.wait_until_settled(SETTLED_WITHIN_S)
        except (LoadError, ServerError) as error:
            sys.exit(f"the load failed: {error}")
    content = {
        "command": f"LOAD_SECONDS={options.seconds} make load",
        "options": {name: value for name, value in vars(options).items() if name != "output"},
        "environment": where | {"guidellm": report["metadata"]["guidellm_version"]},
        "figures": found,
        "pages_afterwards": {
            "held": gauges.held,
            "cached": gauges.cached,
            "free": gauges.free,
            "total": gauges.total,
        },
    }
    print(json.dumps(content, indent=1))
    options.output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
