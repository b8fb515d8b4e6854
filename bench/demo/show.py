"""The output of the demo: answers side by side, figures, bars, painted words, next commands."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from statistics import median

from rich.bar import Bar
from rich.console import Console, Group
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from bench.demo.paint import MARKED, STEPS, Word, paint
from bench.demo.quote import METHOD, Quotations
from bench.demo.talk import FULL, MODEL, SMALL, DemoAnswer, DemoConversation, Pair
from tangram.types import DraftedTokens

MOST_COLUMNS = 100
_MIB, _GIB = 2**20, 2**30


def heading(title: str) -> Rule:
    """The line above a part."""
    return Rule(title, align="left", style="dim")


def explanation(
    talk: DemoConversation,
    pairs: Sequence[Pair],
    words: Sequence[Word],
    quotations: Quotations,
    colored: bool,
) -> Group:
    """All parts after the answers."""
    geometry, tokens = talk.engine.geometry, pairs[0][0].held_tokens
    heads = len(geometry.full_layers) * geometry.kv_heads
    parts = {
        "Answers, time and memory": figures(talk, pairs),
        "How many such conversations fit": bars(talk, tokens),
        "What the heads kept": show_kept_words(words, heads, colored=colored),
        "Faster with drafts": show_drafts(quotations),
        "What to try next": farewell(),
    }
    return Group(*chain.from_iterable((heading(name), part, "") for name, part in parts.items()))


def columns() -> Padding:
    """The part above the answers."""
    return _side_by_side(
        Text("question", "bold"),
        Text(f"ρ {FULL}: all KV entries", "bold"),
        Text(f"ρ {SMALL}: a quarter of them", "bold"),
    )


def answers(pair: Pair) -> Padding:
    """One question, its right answer, and both answers."""
    question = pair[0].question
    asked = Group(question.text, Text(f"expected: {question.expected}", "dim"))
    return _side_by_side(asked, *map(_show_answer, pair))


def _side_by_side(*cells: Text | Group) -> Padding:
    table = Table.grid(padding=(0, 2), expand=True)
    for ratio in (4, 5, 5):
        table.add_column(ratio=ratio)
    table.add_row(*cells)
    return Padding(table, (0, 0, 1, 0))


def _show_answer(answer: DemoAnswer) -> Group:
    grade = Text("right", "green") if answer.right else Text("WRONG", "bold red")
    return Group(grade, Text(answer.text))


def figures(talk: DemoConversation, pairs: Sequence[Pair]) -> Table:
    """Answers, time and memory of both, and why the memory is not ρ."""
    table = Table.grid(padding=(0, 2), expand=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(justify="right")
    table.add_column(style="dim")
    table.add_row("", Text(f"ρ {FULL}", "bold"), Text(f"ρ {SMALL}", "bold"), "")
    for row in (*_quality(pairs), *_memory(talk, pairs[0])):
        table.add_row(*row)
    return table


def _quality(pairs: Sequence[Pair]) -> list[tuple[str, ...]]:
    """Rows of grades and times. The first question computes the document, the others reuse it."""
    sides = list(zip(*pairs, strict=True))
    reused = min(answer.usage.cached_tokens for pair in pairs[1:] for answer in pair)
    later = [median(answer.first_token_s for answer in side[1:]) for side in sides]
    right = [sum(answer.right for answer in side) for side in sides]
    return [
        ("answers right", *(f"{count} of {len(pairs)}" for count in right)),
        ("first token, document read", *(f"{side[0].first_token_s:.2f} s" for side in sides)),
        ("first token, next question", *(f"{s:.2f} s" for s in later), f"{reused:,} tokens reused"),
        ("tokens/s of an answer", *(f"{_tokens_per_s(side):.1f}" for side in sides)),
    ]


def _tokens_per_s(answers: Sequence[DemoAnswer]) -> float:
    decoded = sum(answer.usage.completion_tokens - 1 for answer in answers)
    return decoded / sum(answer.decode_s for answer in answers)


def _memory(talk: DemoConversation, pair: Pair) -> list[tuple[str, ...]]:
    """Rows of the memory of the first conversation, in all and by its parts."""
    page_bytes, chunk_tokens = talk.engine.stats().page_bytes, talk.engine.layout.chunk_tokens
    sealed, raw = divmod(pair[0].held_tokens, chunk_tokens)
    full = [talk.layout(rho).count_held_pages(sealed, 0) * page_bytes for rho in (FULL, SMALL)]
    held = [answer.usage.kv_bytes for answer in pair]
    rest = [whole - part for whole, part in zip(held, full, strict=True)]
    return [
        ("KV memory held", *map(_mib, held), f"{_share(held)}, of which"),
        (f"  {sealed} full chunks", *map(_mib, full), f"{_share(full)}, at most ρ"),
        (f"  newest chunk, {raw} tokens", *map(_mib, rest), "whole until it is full"),
    ]


def _mib(held_bytes: int) -> str:
    return f"{held_bytes / _MIB:.1f} MiB"


def _share(held: Sequence[int]) -> str:
    return f"{held[1] / held[0]:.0%}"


def conversations(talk: DemoConversation, tokens: int) -> dict[float, int]:
    """How many conversations of `tokens` tokens without shared prefixes the pool can run, by ρ."""
    pages = talk.engine.stats().pages_total
    return {rho: pages // talk.layout(rho).most_pages(tokens) for rho in (FULL, SMALL)}


def bars(talk: DemoConversation, tokens: int) -> Group:
    """`conversations`, drawn."""
    fit, pool_gib = conversations(talk, tokens), talk.engine.stats().pool_bytes / _GIB
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    table.add_column(justify="right", no_wrap=True)
    for (rho, count), color in zip(fit.items(), ("bright_black", "green"), strict=True):
        table.add_row(f"ρ {rho}", Bar(max(fit.values()), 0, count, color=color), f"{count}")
    text = (
        f"Conversations of {tokens:,} tokens without a common prefix that fit into {pool_gib:.1f} "
        "GiB. This is the default size of the KV cache here (--kv-cache-gib)."
    )
    return Group(text, "", table)


def show_kept_words(words: Sequence[Word], heads: int, *, colored: bool) -> Group:
    """The painted paragraph and its legend."""
    text = (
        f"A paragraph of the document at ρ {SMALL}. Each of the {heads} KV heads chooses its own "
        "tokens; a word is painted by the share of its entries that are still in the cache."
    )
    return Group(text, "", paint(words, colored=colored), "", _legend(colored))


def _legend(colored: bool) -> Text:
    if not colored:
        return Text(f"[word]: at least {MARKED:.0%} of its entries are kept.")
    ends = [f"{least:.0%}" for least, _ in STEPS[1:]]
    names = [f"below {ends[0]}", *(f"{end} and more" for end in ends)]
    styled = (Text(f" {name} ", style) for name, (_, style) in zip(names, STEPS, strict=True))
    return Text(" ").join(styled)


def show_drafts(quotations: Quotations) -> Text:
    """What drafts gain where an answer repeats its prompt."""
    plain, drafted = quotations
    counts = drafted.drafted or DraftedTokens(0, 0)
    same = "the same text" if plain.text == drafted.text else "ANOTHER TEXT"
    return Text(
        f"Asked to repeat that paragraph, the model writes {plain.tokens_per_s:.1f} tokens/s, and "
        f"{drafted.tokens_per_s:.1f} with drafts from what it has read: {same}. It accepted "
        f"{counts.accepted} of {counts.accepted + counts.rejected} drafted tokens "
        f"(--speculative-config '{json.dumps(dict(METHOD))}')."
    )


def next_commands() -> list[tuple[str, str]]:
    """The next commands to type, and what each does."""
    tangram = program()
    return [
        (f"{tangram} chat {MODEL} --kv-retention {SMALL}", "talk to it in this terminal"),
        (f"{tangram} serve {MODEL} --kv-retention {SMALL}", "an OpenAI-compatible server"),
        (f"{tangram} size llama-3.1-8b --kv-retention {SMALL}", "what another model would hold"),
    ]


def program() -> str:
    """The `tangram` command of this Python, as it is typed here."""
    own, found = Path(sys.executable).with_name("tangram"), shutil.which("tangram")
    if not own.exists():
        return "python -m tangram"
    if found is not None and Path(found) == own:
        return "tangram"
    here = Path.cwd()
    return str(own.relative_to(here) if own.is_relative_to(here) else own)


def farewell() -> Group:
    """`next_commands`, each on a line of its own, to be copied."""
    lines = (
        (Text(f"# {does}", "dim"), Text(command, "bold cyan", no_wrap=True, overflow="ignore"))
        for command, does in next_commands()
    )
    return Group(*chain.from_iterable(lines))


def takes_colors(console: Console) -> bool:
    """Whether the output of `console` has colours."""
    return console.color_system is not None and not console.no_color
