"""What every system is asked, and the figures of its answers.

All prompts are cut from eight calibration texts, so a system gets the same token ids as the others.
Only the second turn of a chat differs: it contains the system's own first answer.

A cell gives rows. A row has some of these figures:

- `first_token_s`: from sending the requests to the first token, the mean over the requests.
- `prefill_tokens_per_s`: tokens of the prompts in that time, of a lone request.
- `decode_tokens_per_s`: the rate of all requests together while all of them decode.
- `total_s`: from sending the requests to the last token of the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from bench.cpu_peers.peer import count_common
from tangram_lab.load.asks import Ask
from tangram_lab.load.clock import TimedAnswer

# Answers asks at once; true: without any cached prefix.
Asker = Callable[[Sequence[Ask], bool], list[TimedAnswer]]
Texts = Sequence[Sequence[int]]
MOST_REQUESTS = 8
LONGEST = 8192  # the limit of the embedded model
COMPARED_TOKENS = 16
TIMES = ("first_token_s", "decode_tokens_per_s", "total_s")


@dataclass(frozen=True)
class PeerRow:
    """A row of the table for one system: its asks and answers, and the names of its figures."""

    title: str
    shown: Sequence[str]
    asks: Sequence[Ask]
    answers: Sequence[TimedAnswer]

    def figures(self) -> dict[str, float]:
        """The figures by name."""
        return {name: FIGURES_OF[name](self.answers) for name in self.shown}


@dataclass(frozen=True)
class PeerCell:
    """A load. `run` takes the texts and an asker; the token counts are for the estimate of time."""

    run: Callable[[Texts, Asker], Iterator[PeerRow]]
    prefill_tokens: int
    steps: int
    kv_tokens: int


def decode_rate(answers: Sequence[TimedAnswer]) -> float:
    """Tokens/s from the last first token to the first last one.

    Raises `ValueError` if an answer ends before another begins: then they never decode together.
    """
    begin = max(answer.times_s[0] for answer in answers)
    end = min(answer.times_s[-1] for answer in answers)
    if end <= begin:
        raise ValueError(
            f"an answer ends after {end:.2f} s, another begins after {begin:.2f} s: ask for more "
            "tokens"
        )
    return sum(begin < at <= end for answer in answers for at in answer.times_s) / (end - begin)


def mean_first_token(answers: Sequence[TimedAnswer]) -> float:
    """Seconds to the first token, the mean."""
    return fmean(answer.first_token_s for answer in answers)


FIGURES_OF: dict[str, Callable[[Sequence[TimedAnswer]], float]] = {
    "first_token_s": mean_first_token,
    "prefill_tokens_per_s": lambda answers: answers[0].prompt_tokens / mean_first_token(answers),
    "decode_tokens_per_s": decode_rate,
    "total_s": lambda answers: max(answer.times_s[-1] for answer in answers),
}


def count_same(ours: PeerRow, theirs: PeerRow) -> int | None:
    """How many of the first 16 tokens are equal, in the answer that differs first.

    None if the prompts differ.
    """
    if [ask.tokens for ask in ours.asks] != [ask.tokens for ask in theirs.asks]:
        return None
    return min(
        count_common(one.token_ids[:COMPARED_TOKENS], other.token_ids[:COMPARED_TOKENS])
        for one, other in zip(ours.answers, theirs.answers, strict=True)
    )


def at_once(batch: int, context: int, output_tokens: int) -> PeerCell:
    """`batch` requests of `context` tokens, no two with a common prefix."""
    title = f"batch {batch}, {context:,} tokens of context"

    def run(texts: Texts, answer: Asker) -> Iterator[PeerRow]:
        asks = [Ask(tuple(text[:context]), output_tokens) for text in texts[:batch]]
        yield PeerRow(title, TIMES, asks, answer(asks, True))

    tokens = batch * context
    return PeerCell(run, tokens, output_tokens, tokens + batch * output_tokens)


def sharing(batch: int, context: int, own: int = 32, output_tokens: int = 64) -> PeerCell:
    """`batch` requests at once whose first `context` tokens are the same, and `own` are not."""
    title = f"{batch} requests that share {context:,} tokens, {output_tokens} out"

    def run(texts: Texts, answer: Asker) -> Iterator[PeerRow]:
        shared = tuple(texts[0][:context])
        asks = [Ask(shared + tuple(text[context:][:own]), output_tokens) for text in texts[:batch]]
        shown = ("first_token_s", "total_s")
        yield PeerRow(title, shown, asks, answer(asks, True))

    kv_tokens = batch * (context + own + output_tokens)
    return PeerCell(run, batch * (context + own), output_tokens, kv_tokens)


def chat(context: int, new: int = 30, output_tokens: int = 32) -> PeerCell:
    """A prompt of `context` tokens; `new` tokens after its answer; the second prompt again."""

    def run(texts: Texts, answer: Asker) -> Iterator[PeerRow]:
        first = [Ask(tuple(texts[0][:context]), output_tokens)]
        answers = answer(first, True)
        shown = ("prefill_tokens_per_s",)
        yield PeerRow(f"{context:,} tokens, nothing cached", shown, first, answers)
        added = tuple(answers[0].token_ids) + tuple(texts[1][:new])
        second = [Ask(first[0].tokens + added, output_tokens)]
        for title in (f"second turn after {context:,} tokens", "the same prompt again"):
            yield PeerRow(title, ("first_token_s",), second, answer(second, False))

    kv_tokens = context + new + 2 * output_tokens
    return PeerCell(run, context + new, 3 * output_tokens, kv_tokens)


def make_cells(scale: int = 1, output_tokens: int = 64) -> dict[str, PeerCell]:
    """All cells by name, contexts divided by `scale`. A context of 0 is a prompt of 16 tokens."""
    return {
        "0x1": at_once(1, 16, output_tokens),
        "0x8": at_once(8, 16, output_tokens),
        "2kx1": at_once(1, 2000 // scale, output_tokens),
        "chat": chat(3000 // scale),
        "shared": sharing(8, 2000 // scale, output_tokens=output_tokens),
        "2kx8": at_once(8, 2000 // scale, output_tokens),
        "8kx1": at_once(1, 8000 // scale, output_tokens),
        "8kx8": at_once(8, 8000 // scale, output_tokens),
    }
