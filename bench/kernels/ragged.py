"""Decode over ragged caches: budgets of real profiles (Tangram), all layers in one graph.

Each case has a twin with the same entries spread evenly: the time of a perfect balance. `--budgets
FILE.npz` makes the profiles from published budgets instead of shipped files: arrays
MODEL/SCORER/SCOPE/{mean,std,layers}, as the authors publish them (aiha-lab/tangram). Times are of
all chosen layers together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.kernels import kernel_report
from bench.kernels.budgets import SHIPPED, choose_layers, even_case, load, make_ragged_case
from bench.kernels.family import Entry, Run, execute, parser
from bench.kernels.summary import BEST, EVEN, Row, device_us, names
from tangram.compress.profile import Profile
from tangram_lab.kernel_benchmarks.case import Case

PLANNERS = ("aot", "uniform", "workqueue")
PEERS = ("decode", "batch")
CONTEXTS, BATCHES = "8192,32768,131072", "1,4,16"
QUICK_CONTEXTS, QUICK_BATCHES = "8192,32768", "1,8"


@dataclass(frozen=True)
class CaseSize:
    """One case's size."""

    profile: Profile
    context_tokens: int
    batch: int
    layers: int

    def make(self, name: str, even: bool, tiny: bool) -> Case:
        """Tiny: two layers, one sealed chunk and a raw tail."""
        layers = choose_layers(self.profile, 2 if tiny else self.layers)
        context, batch = (
            (self.profile.chunk_tokens, min(2, self.batch))
            if tiny
            else (self.context_tokens, self.batch)
        )
        case = make_ragged_case(self.profile, context, batch, layers, seed=0, name=name)
        return even_case(case, seed=1, name=name) if even else case


def entries_of(name: str, setting: CaseSize) -> list[Entry]:
    """The case and its even twin, which only the AOT planner runs."""
    title = f"{_short(name)} {setting.context_tokens // 1024}K × {setting.batch}"
    labels = {
        "profile": name,
        "context_tokens": setting.context_tokens,
        "batch": setting.batch,
        "layers": setting.layers,
        "heads_per_page": setting.profile.heads_per_page,
        "realised_retention": setting.profile.realised_retention,
    }
    return [
        Entry(title, _short(name), partial(setting.make, title, False), labels),
        Entry(
            title + EVEN,
            _short(name) + EVEN,
            partial(setting.make, title, True),
            labels,
            only=("aot",),
        ),
    ]


def _short(name: str) -> str:
    return name.replace("-instruct", "").replace("-2507", "").replace("expected_attention", "ea")


def show(run: Run) -> None:
    """Microseconds of each contender; AOT over the even twin, uniform splits over AOT, FlashInfer
    over AOT.
    """
    rows = {row["case"]: row for row in run.rows}
    listed = [*names(run.rows, ours=True), *names(run.rows, ours=False)]
    table = Table(
        title=f"ragged: device µs of {run.options.layers} layers, cold L2, median of "
        f"{run.options.replays}"
    )
    table.add_column("case", no_wrap=True)
    for column in [
        "KV MB",
        "floor",
        *(n.replace("flashinfer", "fi") for n in listed),
        "even",
        "aot / even",
        "uniform / aot",
        "× best fi",
    ]:
        table.add_column(column, justify="right")
    for name, row in rows.items():
        if not name.endswith(EVEN):
            table.add_row(name, *_cells(device_us(row), row, rows.get(name + EVEN), listed))
    console = Console(width=kernel_report.WIDTH)
    console.print(table)
    kernel_report.show_failures(console, run)


def _cells(times: dict[str, float], row: Row, twin: Row | None, listed: Sequence[str]) -> list[str]:
    even = device_us(twin).get("aot") if twin is not None else None
    aot = times.get("aot")
    pairs = [(aot, even), (times.get("uniform"), aot), (times.get(BEST), aot)]
    return [
        f"{row['unique_bytes'] / 1e6:.0f}",
        f"{row['byte_floor_us']:.1f}",
        *(f"{times[name]:.1f}" if name in times else "-" for name in listed),
        f"{even:.1f}" if even else "-",
        *(f"{above / below:.2f}" if above and below else "-" for above, below in pairs),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the family."""
    options_of = parser(__doc__, PLANNERS, PEERS, page_tokens=16)
    options_of.add_argument(
        "--profiles", nargs="+", default=None, help="MODEL.SCORER.SCOPE.cC.rRHO"
    )
    options_of.add_argument("--budgets", type=Path, default=None, help="published budgets (.npz)")
    options_of.add_argument("--contexts", default=None, help=f"tokens; default {CONTEXTS}")
    options_of.add_argument("--batches", default=None, help=f"default {BATCHES}")
    options_of.add_argument(
        "--layers", type=int, default=8, help="evenly spread layers of the model"
    )
    options = options_of.parse_args(arguments)
    contexts = options.contexts or (QUICK_CONTEXTS if options.quick else CONTEXTS)
    batches = options.batches or (QUICK_BATCHES if options.quick else BATCHES)
    chosen = options.profiles or (SHIPPED[:1] if options.quick else SHIPPED)
    shape = {"page_tokens": options.page_tokens, "heads_per_page": options.heads_per_page}
    profiles = {name: load(name, options.budgets, **shape) for name in chosen}
    entries = [
        entry
        for name, profile in profiles.items()
        for context in contexts.split(",")
        for batch in batches.split(",")
        for entry in entries_of(name, CaseSize(profile, int(context), int(batch), options.layers))
    ]
    execute("ragged", options, entries, show)


if __name__ == "__main__":
    main()
