"""One engine under the loads of docs/serving.md.

Run it once for each engine, without a break, on one machine. It writes serving_NAME.json and
trace_NAME.json after every case, so that later failures lose nothing. With --http it starts the
engine's server and asks as clients do, and writes served_NAME.json and http-trace_NAME.json.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.percentiles import percentiles
from bench.serving.competitors import (
    MODEL,
    MODELS,
    MOST_REQUESTS,
    ServingEngine,
    Tangram,
    Vllm,
    choose_options,
    choose_plugin_options,
    choose_vllm_options,
)
from bench.serving.speed_search import SpeedSearch
from bench.serving.timeline import CASES as STEPS
from bench.serving.timeline import measure_steps
from tangram_lab.environment import environment
from tangram_lab.load.asks import Ask, alike, arriving, draw_tokens, next_turn, read_trace
from tangram_lab.load.clock import (
    NO_LIMITS,
    GivenUpError,
    LatencyLimits,
    Patience,
    Summary,
    TimedAnswer,
)

# A case yields its parts one by one, as they are measured.
Case = Callable[[ServingEngine], Iterator[tuple[str, list[TimedAnswer]]]]
WARM_TOKENS = 8
STREAMS = (8, 32, 64, 128, 256, 512, 1024)


def requests(
    count: int,
    input_tokens: int,
    output_tokens: int,
    shared_tokens: int = 0,
    repeats: int = 1,
    warm_tokens: int = 0,
) -> Case:
    """`count` requests at once, `repeats` times, each time with an empty cache.

    Before them the same requests with answers of `warm_tokens`, if not 0, which do not count.
    """

    def run(engine: ServingEngine) -> Iterator[tuple[str, list[TimedAnswer]]]:
        asks = alike(
            count,
            input_tokens,
            output_tokens,
            shared_tokens=shared_tokens,
            vocab_size=engine.vocab_size,
        )
        if warm_tokens:
            engine.clear_cache()
            _complete(engine, [replace(ask, output_tokens=warm_tokens) for ask in asks])
        for number in range(repeats):
            engine.clear_cache()
            yield f"run {number + 1}", _complete(engine, asks)

    return run


def sessions(
    count: int,
    history_tokens: int,
    turns: int = 3,
    user_tokens: int = 128,
    output_tokens: int = 128,
) -> Case:
    """`count` conversations; each turn runs in all at once, with its whole history."""

    def run(engine: ServingEngine) -> Iterator[tuple[str, list[TimedAnswer]]]:
        engine.clear_cache()
        histories = [
            draw_tokens(history_tokens, engine.vocab_size, 4, number) for number in range(count)
        ]
        for turn in range(1, turns + 1):
            asks = next_turn(histories, turn, user_tokens, output_tokens, engine.vocab_size)
            answers = _complete(engine, asks)
            yield f"turn {turn}", answers
            histories = [
                ask.tokens + tuple(answer.token_ids)
                for ask, answer in zip(asks, answers, strict=True)
            ]

    return run


def short_turns(
    count: int,
    history_tokens: int,
    turns: int,
    rate: float,
    user_tokens: int = 128,
    output_tokens: int = 128,
) -> Case:
    """`count` conversations, whose turns arrive at random, `rate` a second on average."""

    def run(engine: ServingEngine) -> Iterator[tuple[str, list[TimedAnswer]]]:
        engine.clear_cache()
        histories = [
            draw_tokens(history_tokens, engine.vocab_size, 6, number) for number in range(count)
        ]
        yield "histories", _complete(engine, [Ask(history, 1) for history in histories])
        asks = [
            Ask(
                histories[number % count] + draw_tokens(user_tokens, engine.vocab_size, 7, number),
                output_tokens,
            )
            for number in range(turns)
        ]
        yield "turns", _complete(engine, arriving(asks, rate))

    return run


def decoding(count: int, input_tokens: int, output_tokens: int, repeats: int = 3) -> Case:
    """Prompts that are cached, and of their answers the time in which all of them decode.

    `tpot_ms` is then that of a step, and `ttft_s` the time until all decode.
    """

    def run(engine: ServingEngine) -> Iterator[tuple[str, list[TimedAnswer]]]:
        engine.clear_cache()
        prompts = [draw_tokens(input_tokens, engine.vocab_size, 8, row) for row in range(count)]
        _complete(engine, [Ask(prompt, 1) for prompt in prompts])
        for number in range(repeats):
            answers = _complete(engine, [Ask(prompt, output_tokens) for prompt in prompts])
            begin = max(answer.times_s[0] for answer in answers)
            for answer in answers:
                answer.times_s = [at for at in answer.times_s if at >= begin]
                if len(answer.times_s) < 2:
                    raise SystemExit(
                        f"{count} answers of {output_tokens} tokens never decode together: ask for "
                        "more tokens"
                    )
            yield f"run {number + 1}", answers

    return run


def make_replay(options: argparse.Namespace) -> Case:
    """The first minutes of a recorded trace, at the speeds of a `SpeedSearch`.

    Those that hold are yielded. At the end the slowest that did not is raised.
    """

    def run(engine: ServingEngine) -> Iterator[tuple[str, list[TimedAnswer]]]:
        search, too_fast = SpeedSearch(options.speeds, options.within), None
        while (speed := search.find_next()) is not None:
            engine.clear_cache()
            asks = read_trace(
                options.trace, seconds=options.seconds, speed=speed, vocab_size=engine.vocab_size
            )
            try:
                answers = engine.answer_all(asks, Patience(options.hold_ttft_s))
            except GivenUpError as error:
                too_fast = GivenUpError(f"speed {speed:.4g}: {error}")
                print(f"{'':12} {too_fast}", flush=True)
                search.note(speed, held=False)
            else:
                yield f"speed {speed:.4g}", answers
                search.note(speed, held=True)
        if too_fast is not None:
            raise too_fast

    return run


def _complete(engine: ServingEngine, asks: Sequence[Ask]) -> list[TimedAnswer]:
    answers = engine.answer_all(asks)
    for number, (ask, answer) in enumerate(zip(asks, answers, strict=True)):
        if len(answer.token_ids) != ask.output_tokens:
            raise SystemExit(
                f"answer {number} has {len(answer.token_ids)} tokens, {ask.output_tokens} were "
                "asked for"
            )
    return answers


CASES: dict[str, Case] = {
    "prefill": requests(64, 8192, 1, repeats=3),
    "shared": requests(64, 256, 256, shared_tokens=4096, repeats=3),
    "answers-8k": requests(64, 8192, 512, repeats=2),
    "alone-512": requests(1, 512, 256, repeats=3),
    "alone-8k": requests(1, 8000, 256, repeats=3),
    "short-turns": short_turns(24, 8000, 120, 8.0),
    "sessions-40": sessions(40, 16384),
    "sessions-96": sessions(96, 16384),
    "answers-16k": requests(64, 16384, 256),
    "answers-32k": requests(24, 32768, 256),
    "decode-64x16k": decoding(64, 16384, 256),
    **{f"decode-{count}x8k": decoding(count, 8192, 256) for count in (1, 16, 64)},
    "batch-128": requests(256, 128, 128, repeats=3, warm_tokens=WARM_TOKENS),
    "batch-1k": requests(256, 1024, 256, repeats=3, warm_tokens=WARM_TOKENS),
    "batch-8k": requests(64, 8192, 256, repeats=3, warm_tokens=WARM_TOKENS),
    "batch-2k-out": requests(128, 512, 2048, repeats=3, warm_tokens=WARM_TOKENS),
    **{
        f"streams-{count}": requests(count, 512, 256, repeats=3, warm_tokens=WARM_TOKENS)
        for count in STREAMS
    },
}
# What takes more than the default of --max-model-len.
LONG_CASES = {"decode-4x128k": decoding(4, 131072, 256)}


def measure_cases(
    engine: ServingEngine,
    cases: Mapping[str, Case],
    keep: Callable[[dict[str, Any]], None],
    limits: LatencyLimits = NO_LIMITS,
) -> None:
    """Run `cases`; `keep` takes all results so far after every part.

    `limits` define the goodput of a trace.
    """
    results: dict[str, Any] = {}
    for name, case in cases.items():
        kept = results.setdefault(name, {})
        try:
            for part, answers in case(engine):
                summary = Summary.of(answers, limits if name == "trace" else NO_LIMITS)
                kept[part] = asdict(summary) | describe_output(answers, summary) | engine.costs
                keep(results)
                print(f"{name:12} {part:7} {_line(summary)}", flush=True)
        except GivenUpError as error:
            kept["given up"] = str(error)
            keep(results)
            print(f"{name:12} {error}", flush=True)


def describe_output(answers: Sequence[TimedAnswer], summary: Summary) -> dict[str, Any]:
    """Output tokens a second, and ms between each token and the next one of its answer.

    Tokens that come together have no time between them.
    """
    between_ms = [
        1e3 * (later_s - sooner_s)
        for answer in answers
        for sooner_s, later_s in pairwise(answer.times_s)
    ]
    return {
        "output_tokens_per_s": summary.output_tokens / summary.seconds,
        "between_tokens_ms": percentiles(between_ms),
    }


def warm(engine: ServingEngine) -> None:
    """Run requests that compile everything the engine compiles at first use."""
    for asks in (
        alike(2, 4104, 4, shared_tokens=0, vocab_size=engine.vocab_size),
        alike(64, 40, 8, shared_tokens=2100, vocab_size=engine.vocab_size),
    ):
        engine.answer_all(asks)


def _line(summary: Summary) -> str:
    return (
        f"{summary.seconds:7.2f} s {summary.requests_per_s:7.2f} requests/s "
        f"{summary.prompt_tokens / summary.seconds:9,.0f} prompt tokens/s, from cache "
        f"{summary.cached_share:4.0%}, TTFT s p50 {summary.ttft_s['p50']:.2f} p90 "
        f"{summary.ttft_s['p90']:.2f}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Start the engine, run the cases, keep the file."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.engine == "vllm" and (options.kv_retention, options.chunk_tokens) != (None, None):
        parser.error("vllm drops nothing: leave kv-retention and chunk-tokens out")
    if options.timeline == []:
        options.timeline = STEPS
    if options.http and (options.timeline or options.ranks > 1):
        parser.error("http measures one GPU from outside: leave timeline and ranks out")
    if options.api_processes is not None and not options.http:
        parser.error("api-processes are those of a server: add --http")
    known = CASES | LONG_CASES | ({"trace": make_replay(options)} if options.trace else {})
    if unknown := set(options.cases.split(",")) - set(known):
        parser.error(
            f"cases {', '.join(sorted(unknown))} are not known, there are {', '.join(known)}; "
            "trace has --trace"
        )
    try:
        SpeedSearch(options.speeds, options.within)
    except ValueError as error:
        parser.error(str(error))
    if options.series is None:
        shape = "" if options.model == MODEL.name else options.model
        options.series = "-".join(filter(None, ("served" if options.http else "", shape)))
        options.series = options.series or "serving"
    options.model = MODELS / options.model
    # A server outlives a process that is ended without its last steps.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))
    cases = {case: known[case] for case in options.cases.split(",")}
    limits = LatencyLimits(ttft_s=options.hold_ttft_s)
    name = _name(options)
    with _start(options) as engine:
        written = {
            "command": shlex.join(["python", "-m", "bench.serving.compare", *sys.argv[1:]]),
            "environment": environment(),
            "engine": name,
            "options": engine.options,
        }
        warm(engine)
        measure_cases(engine, cases, partial(_keep, options, name, written), limits)
        if options.timeline:
            path = options.output / f"timeline_{name}.json"
            measure_steps(engine, name, options.timeline, partial(_write, path, written))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "engine", choices=("tangram", "vllm", "plugin"), help="plugin is tangram-vllm"
    )
    parser.add_argument(
        "--model",
        choices=sorted(path.name for path in MODELS.iterdir()),
        default=MODEL.name,
        help="a shape of bench/models, with random weights",
    )
    parser.add_argument("--kv-retention", type=float, help="of tangram and the plugin; 0.25")
    parser.add_argument("--chunk-tokens", type=int, help="of tangram; 512")
    parser.add_argument(
        "--packs",
        action="store_true",
        help="the plugin reads what rows share once; then vLLM schedules no step ahead",
    )
    parser.add_argument(
        "--kv-cache-dtype", choices=("auto", "fp8"), default="auto", help="of either engine"
    )
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument(
        "--series",
        help="name of the result files, one for each lease; serving, or served with --http, and "
        "the name of another --model",
    )
    _add_trace_options(parser)
    parser.add_argument(
        "--http", action="store_true", help="measure the engine's server, by clients over HTTP"
    )
    parser.add_argument("--clients", type=int, default=4, help="processes that ask with --http")
    parser.add_argument(
        "--api-processes", type=int, help="of the server, with --http; what each chooses"
    )
    parser.add_argument("--max-model-len", type=int, default=40960)
    parser.add_argument(
        "--max-num-seqs", type=int, default=MOST_REQUESTS, help="of either engine, in one step"
    )
    parser.add_argument(
        "--offload-gib",
        type=float,
        default=0.0,
        help="host memory behind the KV pool, of either engine",
    )
    parser.add_argument(
        "--ranks", type=int, default=1, help="GPUs that share the model, of either engine"
    )
    parser.add_argument(
        "--timeline",
        nargs="*",
        choices=STEPS,
        metavar="CASE",
        help=f"also keep what steps are made of (timeline_*.json): {', '.join(STEPS)}; all",
    )
    return parser


def _add_trace_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trace", type=Path, help="a Mooncake trace (JSON lines), for the case trace"
    )
    parser.add_argument(
        "--seconds", type=float, default=600.0, help="length of the trace to replay"
    )
    parser.add_argument(
        "--speeds",
        type=_read_speeds,
        default=[1.0],
        help="speeds relative to the recording, slowest first, up to the first that is too fast",
    )
    parser.add_argument(
        "--within",
        type=float,
        help="search on, until a speed that is too fast is at most this share above one that holds",
    )
    parser.add_argument(
        "--hold-ttft-s",
        type=float,
        default=5.0,
        help="a speed is too fast when more than a tenth waits longer for a first token",
    )


@contextmanager
def _start(options: argparse.Namespace) -> Iterator[ServingEngine]:
    if options.engine == "tangram":
        chosen = choose_options(
            _retention(options),
            512 if options.chunk_tokens is None else options.chunk_tokens,
            options.max_model_len,
            options.max_num_seqs,
            options.offload_gib,
            options.kv_cache_dtype,
            options.ranks,
        )
    else:
        chosen = choose_vllm_options(
            options.max_model_len,
            options.max_num_seqs,
            options.offload_gib,
            options.ranks,
            options.kv_cache_dtype,
        )
    if options.engine == "plugin":
        chosen |= choose_plugin_options(_retention(options), packs=options.packs)
    if options.http:
        # Where it is not asked for, what it imports need not be there.
        from bench.serving.servers import HttpEngine

        log = options.output / f"{options.series}_{_name(options)}.log"
        kind = "tangram" if options.engine == "tangram" else "vllm"
        engine = HttpEngine(
            kind, options.model, chosen, log, options.clients, options.api_processes
        )
        with closing(engine):
            yield engine
    elif options.engine == "tangram":
        yield Tangram(options.model, chosen)
    else:
        yield Vllm(options.model, **chosen)


def _read_speeds(text: str) -> list[float]:
    return [float(speed) for speed in text.split(",")]


def _retention(options: argparse.Namespace) -> float:
    return 0.25 if options.kv_retention is None else options.kv_retention


def _name(options: argparse.Namespace) -> str:
    """The engine's name in files of results."""
    variants = {
        f"{_retention(options):g}": options.engine != "vllm",
        options.kv_cache_dtype: options.kv_cache_dtype != "auto",
        f"chunk{options.chunk_tokens}": options.chunk_tokens is not None,
        "host": options.offload_gib > 0,
        f"api{options.api_processes}": options.api_processes is not None,
        "packs": options.packs,
    }
    return "-".join([options.engine, *(name for name, chosen in variants.items() if chosen)])


def _keep(
    options: argparse.Namespace, name: str, written: dict[str, Any], results: dict[str, Any]
) -> None:
    trace = "http-trace" if options.http else "trace"
    for kind, wanted in ((trace, {"trace"}), (options.series, set(results) - {"trace"})):
        if found := {case: parts for case, parts in results.items() if case in wanted}:
            _write(options.output / f"{kind}_{name}.json", written, found)


def _write(path: Path, written: dict[str, Any], cases: dict[str, Any]) -> None:
    path.write_text(json.dumps({**written, "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
