"""The picture of one request's way through the engine."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from sheet import (
    DEVICE,
    DEVICE_EDGE,
    HOST,
    HOST_EDGE,
    INK,
    SOFT,
    WIRE,
    WIRE_EDGE,
    arrow,
    box,
    canvas,
)

WIDTH, HEIGHT, GAP, TOP, LOW = 1.98, 1.62, 0.32, 2.72, 0.5
COLUMN = [0.11 + number * (WIDTH + GAP) for number in range(5)]
STEPS = (
    ("text", "chat template,\ntokenizer\n\nengine/text/codec.py", (WIRE, WIRE_EDGE)),
    ("tokens", "prefix cache: which\nchunks are known?\n\ncache/prefix.py", (HOST, HOST_EDGE)),
    (
        "pages reserved",
        "counts are a formula\nof the length\n\ncache/manager.py",
        (HOST, HOST_EDGE),
    ),
    ("plan", "which task reads which\nentries, longest first\n\nplan/aot.py", (HOST, HOST_EDGE)),
    ("kernel", "append, attend,\nmerge over pages\n\nkernels/", (DEVICE, DEVICE_EDGE)),
)
LEGEND = (
    (0.11, "outside", (WIRE, WIRE_EDGE)),
    (1.31, "host: integers, no torch", (HOST, HOST_EDGE)),
    (3.75, "device: tensors", (DEVICE, DEVICE_EDGE)),
)


def draw_walk() -> None:
    """One request's way: text, tokens, pages reserved, plan, kernel, token, text."""
    ax = canvas(11.4, 4.9)
    draw_steps(ax)
    draw_results(ax)
    draw_returns(ax)
    for x, label, (face, edge) in LEGEND:
        ax.add_patch(Rectangle((x, 0.14), 0.2, 0.16, fc=face, ec=edge, lw=1))
        ax.text(x + 0.28, 0.22, label, size=9, va="center", color=SOFT)
    ax.text(
        0.11,
        4.62,
        "engine/loop.py:  schedule → plan → run → commit → emit",
        size=11,
        color=INK,
        va="center",
        family="monospace",
    )


def draw_steps(ax: Axes) -> None:
    """Above: from the text to the kernel."""
    for x, (title, lines, colours) in zip(COLUMN, STEPS, strict=True):
        box(ax, x, TOP, WIDTH, HEIGHT, title, lines, colours)
        if x != COLUMN[0]:
            arrow(ax, (x - GAP + 0.03, TOP + HEIGHT / 2), (x - 0.03, TOP + HEIGHT / 2))


def draw_results(ax: Axes) -> None:
    """Below: the token, the text, and the sealed chunk between them."""
    seal_low = 1.02
    box(
        ax,
        COLUMN[4],
        LOW,
        WIDTH,
        HEIGHT,
        "token",
        "sampled, one per\nrequest and step\n\nsampling/sampler.py",
        (DEVICE, DEVICE_EDGE),
    )
    box(
        ax,
        COLUMN[0],
        LOW,
        WIDTH,
        HEIGHT,
        "text",
        "whole characters,\nstop strings, events\n\nengine/completion.py",
        (WIRE, WIRE_EDGE),
    )
    box(
        ax,
        COLUMN[1],
        seal_low,
        3 * WIDTH + 2 * GAP,
        LOW + HEIGHT - seal_low,
        "a full chunk of C tokens is sealed",
        "each head keeps its own fixed number of entries, packed into their final "
        "pages\nmodel/sealing.py · compress/",
        (DEVICE, DEVICE_EDGE),
    )


def draw_returns(ax: Axes) -> None:
    """What goes from the kernel to the results, and from a sealed chunk to the prefix cache."""
    middle, line = COLUMN[4] + WIDTH / 2, 0.74
    arrow(ax, (middle, TOP - 0.03), (middle, LOW + HEIGHT + 0.03))
    arrow(ax, (COLUMN[4] - 0.03, line), (COLUMN[1] - GAP + 0.03, line))
    ax.text(
        (COLUMN[1] + COLUMN[4] - GAP) / 2,
        line - 0.15,
        "streamed at once; then the next step",
        size=9,
        color=SOFT,
        ha="center",
        va="center",
    )
    arrow(ax, (COLUMN[4] + 0.1, TOP - 0.03), (COLUMN[4] - GAP - 0.15, LOW + HEIGHT + 0.03))
    found = COLUMN[1] + WIDTH / 2
    arrow(ax, (found, LOW + HEIGHT + 0.03), (found, TOP - 0.03), linestyle=(0, (4, 2)))
    ax.text(
        found + 0.14,
        (LOW + HEIGHT + TOP) / 2,
        "immutable, shared by all sequences with the same prefix",
        size=9,
        color=SOFT,
        va="center",
    )
