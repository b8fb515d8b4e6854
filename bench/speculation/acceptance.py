"""How many drafts the embedded model accepts: `python -m bench.speculation acceptance`.

It drafts from what each scorer keeps at each ρ, a fixed number of tokens in every iteration, and
answers questions about texts of four kinds greedily. A cell of the table is one prompt. The file
grows cell by cell, and cells that it holds are not measured again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.logbook import LOGBOOK
from bench.speculation.engines import (
    FixedPace,
    MeasuredEngine,
    build_measured,
    load_measured,
    with_speculation,
)
from bench.speculation.figures import acceptance_rows
from bench.speculation.options import make_parser, output_folder
from bench.speculation.runs import Prompt, measure_run
from bench.speculation.text_prompts import ASKS, SEED, put_question
from tangram.calibrate.texts import KINDS as CALIBRATION_KINDS
from tangram.config import EngineConfig
from tangram.engine.text.codec import TextCodec
from tangram.model.load import LoadedModel
from tangram.progress import show_progress
from tangram_lab.environment import environment

ROOT = Path(__file__).parents[2]
SCORERS = ("fastkvzip", "keydiff", "streaming_llm")
RETENTIONS = (0.5, 0.25, 0.1)
DRAFTED = (4, 8)
CONTEXTS = (3000, 5000, 7000)
LONGEST = 8000


def _dialogue(characters: int) -> str:
    return CALIBRATION_KINDS["dialogue"](random.Random(SEED), characters)


def _document(characters: int) -> str:
    return _join(ROOT.glob("docs/*.md"), characters)


def _source(characters: int) -> str:
    return _join(ROOT.glob("tangram/engine/**/*.py"), characters)


def _story(characters: int) -> str:
    """The demo's document, and behind its end other prose."""
    story = LOGBOOK.read_text(encoding="utf-8")
    return story + "\n\n" + CALIBRATION_KINDS["facts"](random.Random(SEED), characters)


def _join(paths: Iterator[Path], characters: int) -> str:
    text = ""
    for path in sorted(paths):
        if len(text) < characters:
            text += path.read_text(encoding="utf-8") + "\n\n"
    return text


TEXTS: Mapping[str, tuple[Callable[[int], str], str]] = {
    "dialogue": (_dialogue, ASKS["dialogue"]),
    "document": (_document, ASKS["documentation"]),
    "source": (_source, ASKS["source"]),
    "story": (_story, "Tell what happened in the text above, in the order of events."),
}


@dataclass(frozen=True)
class AcceptanceCell:
    """What is measured: a prompt, and how it is drafted for."""

    scorer: str
    kv_retention: float
    drafted: int
    kind: str
    context_tokens: int


class AcceptanceFile:
    """The measured cells, in a file that is written after each."""

    def __init__(self, path: Path, session: Mapping[str, Any]) -> None:
        self._path = path
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        # A file may come from several sessions.
        self._sessions = [*found.get("sessions", ()), session]
        self.cells: list[dict[str, Any]] = found.get("cells", [])

    def has(self, cell: AcceptanceCell) -> bool:
        """Whether it is measured."""
        wanted = asdict(cell)
        return any(all(one[name] == wanted[name] for name in wanted) for one in self.cells)

    def add(self, cell: AcceptanceCell, figures: Mapping[str, Any]) -> None:
        """Keep the figures of `cell`."""
        self.cells.append({**asdict(cell), **figures})
        self._path.parent.mkdir(parents=True, exist_ok=True)
        content = {"sessions": self._sessions, "cells": self.cells}
        self._path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


class AcceptanceBench:
    """One engine at a time, whose drafts are what one scorer keeps at one ρ."""

    def __init__(self, loaded: LoadedModel, tokens: int) -> None:
        self._loaded, self._tokens = loaded, tokens
        self._codec = TextCodec(loaded.tokenizer, eos_token_ids=loaded.eos_token_ids)
        self._prompts: dict[tuple[str, int], Prompt] = {}
        self._pace = FixedPace(max(DRAFTED))
        self._drafts: tuple[str, float] | None = None
        self._measured: MeasuredEngine | None = None

    def measure(self, cell: AcceptanceCell) -> dict[str, Any]:
        """The counts of one answer, and digests: a prompt has one answer in all of its cells."""
        measured = self._engine(cell)
        self._pace.drafted = cell.drafted
        figures, answers = measure_run(
            measured, [self._prompt(cell)], self._tokens, to_the_end=False
        )
        kept = ("seconds", "output_tokens", "speculation")
        return {
            "prompt_tokens": answers[0].prompt_tokens,
            "prompt_sha256": _digest(self._prompt(cell)),
            "answer_sha256": _digest(answers[0].token_ids),
            **{name: figures[name] for name in kept},
        }

    def _engine(self, cell: AcceptanceCell) -> MeasuredEngine:
        drafts = cell.scorer, cell.kv_retention
        if self._measured is None or self._drafts != drafts:
            self._measured, self._drafts = None, drafts  # its pages go before others come
            config = EngineConfig(
                device="cpu",
                scorer=cell.scorer,
                kv_retention=1.0,
                kv_cache_gib=1.5,
                max_num_seqs=1,
                max_model_len=LONGEST,
            )
            method = {
                "method": "compressed_kv",
                "kv_retention": cell.kv_retention,
                "num_speculative_tokens": max(DRAFTED),
            }
            self._measured = build_measured(
                with_speculation(config, method), self._loaded, pace=self._pace
            )
        return self._measured

    def _prompt(self, cell: AcceptanceCell) -> Prompt:
        place = cell.kind, cell.context_tokens
        if place not in self._prompts:
            write, ask = TEXTS[cell.kind]
            text = write(8 * cell.context_tokens)
            self._prompts[place] = put_question(self._codec, text, ask, cell.context_tokens)
        return self._prompts[place]


def _digest(tokens: Sequence[int]) -> str:
    return hashlib.sha256(repr(list(tokens)).encode()).hexdigest()


def list_cells(options: argparse.Namespace) -> list[AcceptanceCell]:
    """The cells to measure. Those of one engine and one prompt come one after the other."""
    return [
        AcceptanceCell(scorer, kv_retention, drafted, kind, context)
        for scorer in options.scorers
        for kv_retention in options.retentions
        for context in options.contexts
        for kind in options.kinds
        for drafted in DRAFTED
    ]


def main(arguments: Sequence[str]) -> None:
    """Measure what is missing, print a table."""
    options = _parser().parse_args(arguments)
    if options.small:
        options.contexts, options.tokens = [600], 24
    session = {
        "command": shlex.join(["python", "-m", "bench.speculation", "acceptance", *arguments]),
        "environment": environment(),
        "answer_tokens": options.tokens,
    }
    file = AcceptanceFile(output_folder(options) / "speculation_acceptance.json", session)
    missing = [cell for cell in list_cells(options) if not file.has(cell)]
    bench = AcceptanceBench(load_measured("smollm2", random=False, device="cpu"), options.tokens)
    begin_s = time.perf_counter()
    for number, cell in enumerate(show_progress(missing, "Drafting"), 1):
        figures = bench.measure(cell)
        file.add(cell, figures)
        left_s = (time.perf_counter() - begin_s) / number * (len(missing) - number)
        share = figures["speculation"]["acceptance"]
        print(
            f"{number}/{len(missing)} {cell.scorer} ρ {cell.kv_retention} γ {cell.drafted} "
            f"{cell.kind} {cell.context_tokens}: {'–' if share is None else f'{share:.3f}'}, "
            f"about {left_s / 60:.0f} min left",
            flush=True,
        )
    _print_table(file.cells)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("acceptance", __doc__)
    parser.add_argument("--scorers", type=_texts, default=list(SCORERS))
    parser.add_argument("--retentions", type=_numbers, default=list(RETENTIONS))
    parser.add_argument("--contexts", type=_counts, default=list(CONTEXTS))
    parser.add_argument("--kinds", type=_texts, default=list(TEXTS))
    parser.add_argument("--tokens", type=int, default=160, help="most tokens of an answer")
    return parser


def _texts(value: str) -> list[str]:
    return value.split(",")


def _numbers(value: str) -> list[float]:
    return [float(part) for part in value.split(",")]


def _counts(value: str) -> list[int]:
    return [int(part) for part in value.split(",")]


def _print_table(cells: Sequence[Mapping[str, Any]]) -> None:
    table = Table(title="accepted of a drafted token, and tokens per iteration")
    kinds = list(dict.fromkeys(cell["kind"] for cell in cells))
    for column in ("scorer", "ρ", "γ", *kinds, "all", "tokens per iteration"):
        table.add_column(column, justify="left" if column == "scorer" else "right")
    for row in acceptance_rows(cells):
        shares = [row["kinds"].get(kind) for kind in kinds]
        table.add_row(
            row["scorer"],
            f"{row['kv_retention']:g}",
            str(row["drafted"]),
            *("" if share is None else f"{share:.3f}" for share in shares),
            f"{row['acceptance']:.3f}",
            f"{row['tokens_per_iteration']:.2f}",
        )
    Console(width=120).print(table)
