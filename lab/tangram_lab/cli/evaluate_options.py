"""The options of `tangram eval`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from tangram.cli.checks import within
from tangram.cli.options import (
    SAMPLES,
    CacheDtype,
    Heads,
    Model,
    Page,
    Panel,
    Quantization,
    Weights,
    engine_option,
    number,
    option,
)
from tangram.compress.profile import ALPHA
from tangram.config import MOST_TOKENS, OPTIONS, SERVED_SCORER
from tangram.limits import Bounds
from tangram_lab.cli.options import (
    CacheGib,
    Device,
    Dtype,
    Eager,
    Gate,
    MaxBatched,
    MaxSeqs,
    Threads,
    Utilization,
)

_COMPRESSION = Panel.compression

Quick = Annotated[
    bool,
    typer.Option(
        "--quick", help="compare full KV with the served setting on few questions, in a few minutes"
    ),
]
Suites = Annotated[
    str,
    typer.Option(
        help="ruler, multiturn, locomo, fidelity, or SUITE/TASK for one task; comma-separated"
    ),
]
Methods = Annotated[str, typer.Option(help="full, uniform, static, lossless; comma-separated")]
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
    str, option(_COMPRESSION, f"{OPTIONS['chunk_tokens'].text}; several, comma-separated")
]
Alphas = Annotated[
    str,
    option(
        _COMPRESSION, "α of static budgets (mean + α · std of a head's shares), comma-separated"
    ),
]
Scopes = Annotated[
    str | None,
    option(
        _COMPRESSION,
        f"{OPTIONS['scope'].text}; both, comma-separated",
        default="the scope that is served with each scorer",
    ),
]
Samples = Annotated[
    int | None,
    typer.Option(
        callback=within(Bounds(1, 100_000)),
        help="contexts of each suite, divided among its tasks",
        show_default="52, or all that a given file holds",
    ),
]
Context = Annotated[
    int, number(Bounds(1, MOST_TOKENS), "tokens of a context, including the chat template")
]
MostQuestions = Annotated[
    int | None, number(Bounds(1, 2**31 - 1), "maximum questions on a context", show_default="all")
]
Locomo = Annotated[
    Path | None, typer.Option(help="file of LoCoMo, or a folder of them, for the suite locomo")
]
Text = Annotated[
    Path | None,
    typer.Option(help="text file for the suite fidelity", show_default="source files of Python"),
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
    bool, option(Panel.expert, "pad contexts to whole chunks; otherwise the end of each stays raw")
]
AlignTokens = Annotated[
    int | None,
    option(
        Panel.expert,
        "pad contexts to a multiple of this, so that runs can be compared",
        default="the largest chunk",
        callback=within(Bounds(1, MOST_TOKENS)),
    ),
]
CalibrationSamples = Annotated[int, number(SAMPLES, "built-in texts to calibrate on")]
ResultFile = Annotated[
    Path,
    typer.Option("--output", "-o", help="file of all replies; those in it are not asked again"),
]
ReportFile = Annotated[Path | None, typer.Option(help="write the tables to this file (Markdown)")]
Plot = Annotated[Path | None, typer.Option(help="plot scores against ρ to this file (PNG)")]
Seed = Annotated[int, engine_option("seed", "seed of the samples")]


@dataclass(frozen=True)
class EvalOptions:
    """The options of `tangram eval`, in the order of its help."""

    model: Model = "smollm2"
    quick: Quick = False
    suites: Suites = "ruler, multiturn"
    methods: Methods = "full, uniform, static, lossless"
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
    quantization: Quantization = None
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
