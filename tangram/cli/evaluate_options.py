"""The options of `tangram eval`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from tangram.cli.checks import within
from tangram.cli.options import (
    PILOT_SAMPLES,
    CacheDtype,
    CacheGib,
    Device,
    Dtype,
    Eager,
    Gate,
    Heads,
    MaxBatched,
    MaxSeqs,
    Model,
    Page,
    Panel,
    Threads,
    Utilization,
    Weights,
    engine_option,
    number,
    option,
)
from tangram.compress.profile import ALPHA
from tangram.config import MOST_TOKENS, OPTIONS, SERVED_SCORER
from tangram.limits import Bounds

_COMPRESSION = Panel.compression

Quick = Annotated[
    bool,
    typer.Option(
        "--quick",
        help="a few minutes: few questions and texts, everything kept against what is served",
    ),
]
Suites = Annotated[
    str,
    typer.Option(
        help="ruler, multiturn, locomo, fidelity, or SUITE/TASK for one task; comma-separated"
    ),
]
Methods = Annotated[
    str, typer.Option(help="full, uniform, dynamic, static, one-shot; comma-separated")
]
Scorers = Annotated[
    str | None,
    option(
        _COMPRESSION, f"{OPTIONS['scorer'].text}; several, comma-separated", default=SERVED_SCORER
    ),
]
Retentions = Annotated[
    str | None,
    option(
        _COMPRESSION,
        "fraction of KV entries kept; several, comma-separated",
        default="0.7,0.5,0.3, with --quick 0.5,0.25",
    ),
]
Chunks = Annotated[
    str,
    option(
        _COMPRESSION, "tokens that are computed and sealed in one piece; several, comma-separated"
    ),
]
Alphas = Annotated[
    str, option(_COMPRESSION, "α of static: budgets are mean + α · std; comma-separated")
]
Scopes = Annotated[
    str | None,
    option(
        _COMPRESSION,
        f"{OPTIONS['scope'].text}; both, comma-separated",
        default="as each scorer is served",
    ),
]
Samples = Annotated[
    int | None,
    typer.Option(
        callback=within(Bounds(1, 100_000)),
        help="contexts of each suite, shared out among its tasks",
        show_default="52, or what files given hold",
    ),
]
Context = Annotated[
    int, number(Bounds(1, MOST_TOKENS), "tokens of a context, chat template included")
]
MostQuestions = Annotated[
    int | None, number(Bounds(1, 2**31 - 1), "most questions about a context", show_default="all")
]
Locomo = Annotated[
    Path | None, typer.Option(help="LoCoMo's file, or a folder of such, for suite locomo")
]
Text = Annotated[
    Path | None,
    typer.Option(
        help="a text file for suite fidelity", show_default="sources that come with Python"
    ),
]
Sinks = Annotated[
    int | None,
    option(
        _COMPRESSION,
        "first tokens of a sequence that static and uniform always keep",
        default="4",
        callback=within(Bounds(0, MOST_TOKENS)),
    ),
]
Window = Annotated[
    int | None,
    option(
        _COMPRESSION,
        "last tokens of a chunk that static and uniform always keep",
        default="C / 64",
        callback=within(Bounds(0, MOST_TOKENS)),
    ),
]
Align = Annotated[
    bool,
    option(Panel.expert, "fill up contexts to whole chunks; without it the rest of each stays raw"),
]
AlignTokens = Annotated[
    int | None,
    option(
        Panel.expert,
        "fill up contexts to a multiple of this: so other grids ask the same",
        default="the largest chunk",
        callback=within(Bounds(1, MOST_TOKENS)),
    ),
]
CalibrationSamples = Annotated[int, number(PILOT_SAMPLES, "built-in pilot texts to calibrate on")]
ResultFile = Annotated[
    Path,
    typer.Option("--output", "-o", help="keep every reply here; what is there is not repeated"),
]
ReportFile = Annotated[Path | None, typer.Option(help="write the tables here (Markdown)")]
Plot = Annotated[Path | None, typer.Option(help="draw scores against ρ here (PNG)")]
Seed = Annotated[int, engine_option("seed", "seed of the samples")]


@dataclass(frozen=True)
class EvalOptions:
    """What `tangram eval` is given, in the order of its help."""

    model: Model = "smollm2"
    quick: Quick = False
    suites: Suites = "ruler, multiturn"
    methods: Methods = "full, uniform, dynamic, static"
    samples: Samples = None
    context_tokens: Context = 4096
    max_questions: MostQuestions = None
    locomo: Locomo = None
    text: Text = None
    calibration_samples: CalibrationSamples = 50
    output: ResultFile = Path("results.json")
    report: ReportFile = None
    plot: Plot = None
    dtype: Dtype = "auto"
    load_format: Weights = "auto"
    device: Device = "auto"
    kv_cache_gib: CacheGib = None
    gpu_memory_utilization: Utilization = 0.9
    kv_cache_dtype: CacheDtype = "auto"
    scorer: Scorers = None
    kv_retention: Retentions = None
    chunk_tokens: Chunks = "512"
    alphas: Alphas = f"{ALPHA:g}"
    scope: Scopes = None
    sink_tokens: Sinks = None
    window_tokens: Window = None
    gate: Gate = None
    max_num_seqs: MaxSeqs = 32
    max_num_batched_tokens: MaxBatched = 2048
    align: Align = True
    align_tokens: AlignTokens = None
    page_tokens: Page = 16
    heads_per_page: Heads = 4
    enforce_eager: Eager = False
    threads: Threads = None
    seed: Seed = 0
