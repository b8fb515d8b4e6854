"""Attention over latents: decode by tile, and prefill of a pass row by row and by its kernel.

Decode is measured in one layer of DeepSeek's latents (512 + 64 elements) over scattered pages, in
bytes of latents a second; its answer is compared with attention in float64 before its clock starts.
"served" is the tile that an engine takes; `--tiles` and `--programs` (tasks that a multiprocessor
is taken to run at once) try others. A pass of prefill has 16 chunks of 512 tokens behind a past.
`--small` checks tiny cases on the CPU, in Triton's interpreter (TRITON_INTERPRET=1), and times
nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional

from bench.kernels.family import NO_DEVICE, RESULTS
from tangram.kernels import latents
from tangram.kernels.interface import AttentionRule
from tangram.kernels.triton import expanded
from tangram.kernels.triton.card import Card
from tangram.kernels.triton.card_cost import count_programs
from tangram.kernels.triton.packed import rehearse_packing
from tangram.kernels.triton.stored import StoredPool
from tangram.kernels.triton.tiling import Tile
from tangram.plan.records import PAST, SPAN
from tangram.plan.workqueue import Grain, plan_workqueue
from tangram_lab.environment import environment
from tangram_lab.kernel_benchmarks.case import BatchGeometry, Case, own_case
from tangram_lab.kernel_benchmarks.timing import Ceilings, ColdCache, Measurement, measure

RANK, ROTARY, PLAIN, VALUE = 512, 64, 128, 128
SHAPES = {"32 × 16K": (16384,) * 32, "64 × 4K": (4096,) * 64, "mixed": (16384, 700, 3000, 90) * 8}
SMALL = 150, 40, 1, 64
# Queries, entries, warps, stages; t: queries are the columns of products.
TILES = ("32,32,4,3,t", "32,64,4,2,t", "64,64,8,2", "32,32,8,3")
PREFILL_TILES = ("64,64,4,2", "128,64,8,3")
SERVED, ALONE = "served", "row by row"
KERNELS: dict[str, str | None] = {
    SERVED: None,
    **{f"expanded {text}": text for text in PREFILL_TILES},
}
HEADS = (32, 16, 128)
SCALING = 0.05
CHUNK, ROWS = 512, 16
HOST_CYCLES = 100_000_000  # some 50 ms of a GPU: longer than the host takes to launch a call
Numbers = dict[str, Any]


def parse_tile(text: str, heads: int = 1 << 20) -> Tile:
    """A tile as `TILES` write it; where queries are columns, of no more of them than heads."""
    *numbers, turned = [*text.split(","), ""][:5]
    queries, entries, warps, stages = map(int, numbers)
    if turned:
        queries = min(queries, max(16, 1 << (heads - 1).bit_length()))
    return Tile(queries, entries, warps, stages, turned == "t")


@dataclass(frozen=True, eq=False)
class LatentBatch:
    """One layer of decode: `pool` [pages, 1, 1, P, 576] and `q` [R, Q, 576]."""

    case: Case
    pool: Tensor
    q: Tensor
    tables: Tensor
    lengths: Tensor

    @classmethod
    def build(
        cls, lengths: Sequence[int], heads: int, dtype: torch.dtype, device: torch.device
    ) -> LatentBatch:
        geometry = BatchGeometry(1, heads, RANK + ROTARY, 16, 1)
        case = own_case(f"{len(lengths)} rows", list(lengths), geometry, seed=0)
        torch.manual_seed(0)
        wide: Numbers = {"dtype": torch.bfloat16 if dtype.itemsize == 1 else dtype}
        shape = case.pages, 1, 1, geometry.page_tokens, geometry.head_dim
        return cls(
            case,
            torch.randn(shape, **wide, device=device).to(dtype),
            torch.randn((len(lengths), heads, geometry.head_dim), **wide, device=device),
            torch.from_numpy(case.tables).to(device),
            torch.from_numpy(case.lengths).to(device),
        )

    @property
    def read_bytes(self) -> int:
        """Of the latents that all rows read."""
        return int(self.case.lengths.sum()) * (RANK + ROTARY) * self.pool.itemsize

    def compute_expected(self) -> Tensor:
        """The answer [R, Q, 512], in float64 until it is rounded to float32."""
        rows, size = self.case.rows, self.case.geometry.page_tokens
        answers = []
        for row, length in enumerate(self.case.lengths.tolist()):
            table = int(rows.table[row, 0, 0])
            pages = self.tables[table : table + -(-length // size)].long()
            blocks = self.pool.view(torch.uint8) if self.pool.itemsize == 1 else self.pool
            entries = (
                blocks[pages]
                .view(self.pool.dtype)
                .float()
                .double()
                .view(-1, RANK + ROTARY)[:length]
            )
            weights = torch.softmax(self.q[row].double() @ entries.T * SCALING, -1)
            answers.append((weights @ entries[:, :RANK]).float())
        return torch.stack(answers)


class Decode:
    """Tangram's decode of a workload with one tile, as the work queue cuts it."""

    each_step = False
    replans = True

    def __init__(self, work: LatentBatch, text: str, programs: int, card: Card) -> None:
        from tangram.kernels.triton.decode_launch import GpuDecode

        tile = None if text == SERVED else parse_tile(text, work.q.shape[1])

        class Tiled(GpuDecode):
            """Runs `tile`, whatever fits."""

            def _tiles_for(self, q: Tensor, out: Tensor) -> list[Tile]:
                return [tile] * 6 if tile else super()._tiles_for(q, out)

        case = work.case
        self.name = f"{text} × {programs}"
        plan = plan_workqueue(
            case.rows, case.lengths, Grain(programs * card.processors, finer=True)
        )
        self.tasks = len(plan.tasks)
        scales = torch.ones(1, 1, 2, device=work.pool.device) if work.pool.itemsize == 1 else None
        self._work, self._plan = work, plan
        self._decoder = Tiled(
            plan, StoredPool.of(work.pool, scales, card), case.geometry.group, lengths=case.lengths
        )

    def plan(self) -> None:
        """Upload the plan."""
        self._decoder.load(self._plan, self._work.case.lengths)

    def run(self) -> list[Tensor]:
        """The layer."""
        work = self._work
        out = torch.empty((*work.q.shape[:2], RANK), dtype=work.q.dtype, device=work.q.device)
        return [
            self._decoder.attend(
                0, work.q, work.tables, work.lengths, AttentionRule(SCALING), out=out
            )
        ]


def compile_tile(heads: int, text: str, dtype: str) -> None:
    """Compile decode with a tile, by a tiny workload, for Triton's cache on disk."""
    device = torch.device("cuda")
    work = LatentBatch.build((150,), heads, getattr(torch, dtype), device)
    try:
        Decode(work, text, 1, Card.of(device)).run()
        torch.cuda.synchronize()
    except Exception as error:  # it is named again where it is measured
        print(f"{heads} heads, {text}: {type(error).__name__}", file=sys.stderr)


def compile_prefill(name: str) -> None:
    """Compile one form of prefill."""
    TimedPass(32, 0, 64, torch.bfloat16, torch.device("cuda")).forms()[name]()
    torch.cuda.synchronize()


def compile_all(options: argparse.Namespace) -> None:
    """Compile in several processes at once; measuring then finds everything in the cache."""
    rehearse_packing()  # before, or each of them would compile it
    jobs = list(product(options.heads, [SERVED, *options.tiles], options.dtypes))
    with ProcessPoolExecutor(12, mp_context=get_context("spawn")) as pool:
        done = [pool.submit(compile_tile, *job) for job in jobs]
        if not options.no_prefill:
            done += [pool.submit(compile_prefill, name) for name in KERNELS]
        for one in done:
            one.result()


def decode(options: argparse.Namespace, copy_bytes_per_us: float) -> list[Numbers]:
    """A row of numbers for each type of entries, heads, shape, tile and number of programs."""
    device = torch.device("cuda")
    card, cold, found = Card.of(device), ColdCache(device), list[Numbers]()
    for dtype, heads, shape in product(options.dtypes, options.heads, options.shapes):
        work = LatentBatch.build(SHAPES[shape], heads, getattr(torch, dtype), device)
        answer = [work.compute_expected()]
        asked = [(SERVED, count_programs(work.pool, heads, card))]
        asked += product(options.tiles, options.programs)
        for text, programs in asked:
            row: Numbers = {"heads": heads, "shape": shape, "tile": text, "programs": programs}
            row["dtype"] = dtype
            try:
                run = Decode(work, text, programs, card)
                told = measure(run, answer, cold, replays=options.replays, wall=False)
                row |= _numbers(told, run, work, copy_bytes_per_us)
            except Exception as error:
                row["failed"] = f"{type(error).__name__}: {error}"[:200]
                torch.cuda.synchronize()
            found.append(row)
            print(row, file=sys.stderr, flush=True)
    return found


def _numbers(
    told: Measurement, run: Decode, work: LatentBatch, copy_bytes_per_us: float
) -> Numbers:
    rate = work.read_bytes / told.median_us
    return {
        "tasks": run.tasks,
        "us": told.median_us,
        "least_us": told.min_us,
        "tb_per_s": rate / 1e6,
        "of_copy": rate / copy_bytes_per_us,
        "error": told.error,
        "same_bits": told.same_bits,
    }


class TimedPass:
    """One layer of a pass of prefill: 16 chunks of one sequence behind `past` latents."""

    def __init__(
        self, heads: int, past: int, chunk: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        torch.manual_seed(1)
        made: Numbers = {"dtype": dtype, "device": device}
        tokens, width = ROWS * chunk, RANK + ROTARY
        pages = -(-(past + tokens) // 16)
        self.pool = torch.randn(pages, 1, 1, 16, width, **made)
        self.tables = torch.randperm(pages, device=device).int()
        self.up = torch.randn(heads, PLAIN + VALUE, RANK, **made) / RANK**0.5
        self.value_dim, self.card = VALUE, Card.of(device)
        self.q = torch.randn(tokens, heads, PLAIN + ROTARY, **made)
        self.new = torch.randn(tokens, width, **made)
        begins = [row * chunk for row in range(ROWS)]
        self.spans = np.array([(b, b + chunk, b, b + chunk, past + b) for b in begins], SPAN)
        self.address = np.array([(0, 0, past + begin) for begin in begins], PAST)
        self.heads, self.scaling = heads, (PLAIN + ROTARY) ** -0.5
        # Its pasts hold what the chunks before it are.
        flat = self.pool[self.tables.long()].view(-1, width)
        flat[past : past + tokens] = self.new
        self.pool[self.tables.long()] = flat.view(self.pool.shape)

    def expand(self, entries: Tensor) -> tuple[Tensor, Tensor]:
        """As Transformers' DeepSeek expands."""
        latent, rotary = entries.split([RANK, ROTARY], -1)
        both = functional.linear(latent, self.up.view(-1, RANK))
        both = both.view(len(entries), self.heads, -1).transpose(0, 1)
        plain, value = both.split([PLAIN, VALUE], -1)
        turned = rotary[None].expand(self.heads, -1, -1)
        return torch.cat([plain, turned], -1), value

    @property
    def operations(self) -> int:
        """Floating-point operations of all products of attention; none for what is padded."""
        chunk = int(self.spans["query_end"][0])
        seen = chunk * (int(self.address["length"].sum()) + ROWS * (chunk + 1) // 2)
        return 2 * self.heads * (PLAIN + ROTARY + VALUE) * seen

    def forms(self) -> dict[str, Callable[[], Tensor]]:
        """The same pass in several ways."""
        what: Numbers = {"expand": self.expand, "scaling": self.scaling}

        def alone() -> Tensor:
            return torch.cat(
                [
                    latents.prefill(
                        self.q[a:b], self.new[a:b], self.pool, self.tables, place, **what
                    )
                    for (a, b, *_), place in zip(
                        self.spans.tolist(), self.address.tolist(), strict=True
                    )
                ]
            )

        def by_kernel(tile: Tile | None) -> Tensor:
            out = self.q.new_empty((*self.q.shape[:2], VALUE))
            rows = expanded.LatentRows(self.spans, self.address, self.tables)
            pool = StoredPool.of(self.pool, card=self.card)
            expanded.attend(
                self.q, self.new, pool, rows, self, out, scaling=self.scaling, tile=tile
            )
            return out

        kernels = {
            name: partial(by_kernel, text and parse_tile(text)) for name, text in KERNELS.items()
        }
        return {ALONE: alone, **kernels}

    def peers(self) -> dict[str, Callable[[], Any]]:
        """Torch's kernels over the new tokens alone: of these heads, and of GQA of 128 elements."""
        keys, values = self.expand(self.new)
        query = self.q.transpose(0, 1)[None]
        grouped = query[..., :128]
        few = torch.randn_like(grouped[:, : max(1, self.heads // 4)])
        many = few.repeat_interleave(4, 1)
        cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
        flash = functional.scaled_dot_product_attention
        rest: Any = (None, True, 0.0, True)
        return {
            "causal, cuDNN, 192 and 128": lambda: cudnn(query, keys[None], values[None], *rest),
            "causal, GQA of 128, cuDNN": lambda: cudnn(grouped, many, many, *rest),
            "causal, GQA of 128, flash": lambda: flash(
                grouped, few, few, is_causal=True, enable_gqa=True
            ),
        }


def prefill(past: int, heads: int) -> Numbers:
    """Milliseconds of a pass by form, how far the forms are apart, and of torch's kernels."""
    device = torch.device("cuda")
    run = TimedPass(heads, past, CHUNK, torch.bfloat16, device)
    found: Numbers = {"past": past, "heads": heads, "operations": run.operations}
    first, times, apart = None, dict[str, float](), dict[str, float]()
    for name, form in run.forms().items():
        try:
            answer = form().float()
            first = answer if first is None else first
            apart[name] = float((answer - first).norm() / first.norm())
            times[name] = _milliseconds(form)
        except Exception as error:
            found[f"failed, {name}"] = f"{type(error).__name__}: {error}"[:160]
    found["apart"], found["ms"] = apart, times
    found["tflops"] = {name: run.operations / ms / 1e9 for name, ms in times.items()}
    found["parts_ms"] = {}
    for name, part in run.peers().items():
        try:
            found["parts_ms"][name] = _milliseconds(part)
        except Exception as error:
            found["parts_ms"][name] = f"{type(error).__name__}: {error}"[:160]
    print(found, file=sys.stderr, flush=True)
    return found


def _milliseconds(call: Callable[[], Any], repeats: int = 5) -> float:
    """The device's time of a call, the median of some: the host launches all of it beforehand."""
    times = []
    for number in range(repeats + 2):
        torch.cuda._sleep(HOST_CYCLES)  # type: ignore[no-untyped-call]
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        if number >= 2:
            times.append(begin.elapsed_time(end))
    return float(np.median(times))


def show(found: Numbers) -> None:
    """Tables of what was measured."""
    table = Table(
        "entries", "heads", "shape", "tile", "programs", "tasks", "µs", "TB/s", "of copy", "error"
    )
    rows = [row for row in found["decode"] if "us" in row]
    for row in sorted(rows, key=lambda row: (row["dtype"], -row["heads"], row["shape"], row["us"])):
        table.add_row(
            row["dtype"],
            str(row["heads"]),
            row["shape"],
            row["tile"],
            str(row["programs"]),
            str(row["tasks"]),
            f"{row['us']:.0f}",
            f"{row['tb_per_s']:.2f}",
            f"{row['of_copy']:.2f}",
            f"{row['error']:.1e}" + ("" if row["same_bits"] else " other bits"),
        )
    console = Console(width=120)
    console.print(table)
    for row in found["decode"]:
        if "failed" in row:
            console.print(row["heads"], row["shape"], row["tile"], row["failed"])
    for one in found["prefill"]:
        console.print(one)


def check_small() -> None:
    """Tiny cases in Triton's interpreter, and the forms of prefill on the CPU."""
    from tangram_lab.kernel_benchmarks.timing import relative_error

    device = torch.device("cpu")
    work = LatentBatch.build(SMALL, 20, torch.float32, device)
    card = replace(Card.of(device), processors=4)
    for text in (SERVED, *TILES):
        run = Decode(work, text, 1, card)
        run.plan()
        error = relative_error(run.run()[0], work.compute_expected())
        print(f"{text}: {run.tasks} tasks, relative error {error:.1e}")
        assert error < 1e-2
    forms = TimedPass(2, 40, 24, torch.float16, device).forms()
    alone = forms[ALONE]().float()
    for name in KERNELS:
        error = relative_error(forms[name](), alone)
        print(f"{name}: relative error {error:.1e}")
        assert error < 1e-2


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, write the result file and show tables. Exits with 2 where there is no device."""
    asked = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    asked.add_argument("--heads", type=int, nargs="+", default=list(HEADS))
    asked.add_argument("--shapes", nargs="+", default=["32 × 16K", "64 × 4K"], choices=SHAPES)
    asked.add_argument("--tiles", nargs="*", default=list(TILES), help="none: only what serves")
    asked.add_argument("--programs", type=int, nargs="+", default=[1, 2])
    asked.add_argument("--dtypes", nargs="+", default=["bfloat16", "float8_e4m3fn"])
    asked.add_argument("--replays", type=int, default=10)
    asked.add_argument("--no-prefill", action="store_true")
    asked.add_argument("--small", action="store_true")
    asked.add_argument("--out", type=Path, default=RESULTS)
    options = asked.parse_args(arguments)
    if options.small:
        return check_small()
    if not torch.cuda.is_available():
        print(NO_DEVICE, file=sys.stderr)
        raise SystemExit(2)
    begun, typed = time.monotonic(), sys.argv[1:] if arguments is None else arguments
    command = " ".join(["python -m bench.kernels.latents", *typed])
    found: Numbers = {"command": command, "environment": environment()}
    compile_all(options)
    found["compiled_s"] = time.monotonic() - begun
    ceilings = Ceilings.measure(torch.bfloat16, torch.device("cuda"))
    found["ceilings"] = asdict(ceilings)
    found["prefill"] = [] if options.no_prefill else [prefill(past, 32) for past in (0, 8192)]
    found["decode"] = decode(options, ceilings.copy_bytes_per_us)
    found["seconds"] = time.monotonic() - begun
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "kernels_latents.json").write_text(json.dumps(found, indent=1) + "\n")
    show(found)
    print(f"{found['seconds']:.0f} s, {found['compiled_s']:.0f} of them compiling")
    return None


if __name__ == "__main__":
    main()
