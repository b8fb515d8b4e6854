"""The same document and questions with the full KV cache and with a quarter of it: `make demo`.

It needs no network and no GPU: the model is the embedded one. The exit code is 0 only if every
question was answered at both ratios, the document was reused, the compressed cache was smaller, and
drafts changed no word.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from transformers.utils import logging as transformers_logging

from bench.demo import show
from bench.demo.paint import Word, words_of
from bench.demo.quote import Quotations, quote_twice
from bench.demo.talk import FULL, MODEL, QUESTIONS, SMALL, DemoConversation, Pair
from tangram.errors import TangramError

PARAGRAPH = "The large telescope has a name."


@dataclass(frozen=True)
class Findings:
    """The findings of the demo: engine and document, all answers, a painted paragraph, and the same
    paragraph quoted without drafts and with them.
    """

    talk: DemoConversation
    pairs: list[Pair]
    words: list[Word]
    quotations: Quotations

    @property
    def problems(self) -> list[str]:
        """The broken promises, in words; empty when all is well."""
        found = []
        for number, pair in enumerate(self.pairs, 1):
            whole, small = (answer.usage for answer in pair)
            if number > 1 and min(whole.cached_tokens, small.cached_tokens) == 0:
                found.append(f"question {number} reused nothing of the document")
            if small.kv_bytes >= whole.kv_bytes:
                found.append(
                    f"question {number} holds {small.kv_bytes} KV bytes at ρ {SMALL}, not below "
                    f"the {whole.kv_bytes} at ρ {FULL}"
                )
        plain, drafted = self.quotations
        if plain.text != drafted.text:
            found.append(f"with drafts the model wrote {drafted.text!r}, not {plain.text!r}")
        return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.demo", description=__doc__)
    parser.add_argument("--svg", type=Path, help="also keep what is printed as a picture")
    svg = parser.parse_args(arguments).svg
    console = _make_recording_console() if svg else _bound_width(Console(highlight=False))
    transformers_logging.disable_progress_bar()
    try:
        findings = run(console)
    except TangramError as error:
        console.print(f"the demo failed: {error}", style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted")
        return 130
    if svg:
        console.save_svg(str(svg), title="make demo")
    return 1 if findings.problems else 0


def _make_recording_console() -> Console:
    return Console(
        record=True,
        force_terminal=True,
        color_system="truecolor",
        width=show.MOST_COLUMNS,
        highlight=False,
    )


def _bound_width(console: Console) -> Console:
    console.width = min(console.width, show.MOST_COLUMNS)
    return console


def run(console: Console, model: str = MODEL) -> Findings:
    """The whole demo, as it is printed."""
    begin_s = time.perf_counter()
    console.print(show.heading("Tangram: one document, with its whole KV cache and with a quarter"))
    console.print(f"Starting {model}; the first start compiles kernels and may take a minute.")
    talk = DemoConversation(model)
    pairs = converse(talk, console)
    paragraph = _paragraph(talk.document)
    words = words_of(talk.pieces(QUESTIONS[0]), paragraph, talk.kept)
    quotations = quote_twice(talk.loaded, paragraph)
    findings = Findings(talk, pairs, words, quotations)
    colored = show.takes_colors(console)
    console.print(show.explanation(talk, pairs, words, quotations, colored))
    for problem in findings.problems:
        console.print(problem, style="red", markup=False)
    console.print(f"{time.perf_counter() - begin_s:.0f} s in all", style="dim")
    return findings


def converse(talk: DemoConversation, console: Console) -> list[Pair]:
    """Ask everything at both ratios, and show each pair of answers."""
    tokens, speed = len(talk.prompt(QUESTIONS[0])), talk.tokens_per_s()
    console.print(
        f"The document has {tokens:,} tokens. This machine computes {speed:.0f} a second, so "
        f"reading it at both ratios takes about {2 * tokens / speed:.0f} s.\n"
    )
    pairs = [_read(talk, tokens)]
    console.print(show.columns())
    console.print(show.answers(pairs[0]))
    for question in QUESTIONS[1:]:
        pairs.append((talk.ask(question, FULL), talk.ask(question, SMALL)))
        console.print(show.answers(pairs[-1]))
    return pairs


def _read(talk: DemoConversation, tokens: int) -> Pair:
    """The first question, which computes the document, with a progress bar in a terminal."""
    console = Console(stderr=True)
    sealed = tokens - tokens % talk.engine.layout.chunk_tokens
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        whole, small = (
            talk.ask(
                QUESTIONS[0],
                rho,
                partial(progress.advance, progress.add_task(f"reading at ρ {rho}", total=sealed)),
            )
            for rho in (FULL, SMALL)
        )
    return whole, small


def _paragraph(document: str) -> str:
    return next(part for part in document.split("\n\n") if part.startswith(PARAGRAPH))


if __name__ == "__main__":
    sys.exit(main())
