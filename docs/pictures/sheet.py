"""What the pictures share: colours, boxes, arrows and a blank sheet."""

from __future__ import annotations

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

INK, SOFT, PAPER = "#1f2933", "#66727f", "#ffffff"
HOST, DEVICE, WIRE = "#e3eefb", "#fdecd8", "#eceff1"
HOST_EDGE, DEVICE_EDGE, WIRE_EDGE = "#3b74b8", "#c8771c", "#8a96a3"


def box(
    ax: Axes,
    x: float,
    y: float,
    width: float,
    height: float,
    title: str,
    lines: str,
    colours: tuple[str, str],
) -> None:
    """A rounded box with a title and smaller lines below it."""
    face, edge = colours
    ax.add_patch(
        FancyBboxPatch(
            (x, y),
            width,
            height,
            boxstyle="round,pad=0,rounding_size=0.10",
            fc=face,
            ec=edge,
            lw=1.3,
        )
    )
    ax.text(
        x + width / 2,
        y + height - 0.2,
        title,
        ha="center",
        va="top",
        size=12,
        weight="bold",
        color=INK,
    )
    ax.text(
        x + width / 2,
        y + height - 0.58,
        lines,
        ha="center",
        va="top",
        size=9,
        color=INK,
        linespacing=1.45,
    )


def arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float], **style: object) -> None:
    """An arrow between two points."""
    options = {
        "arrowstyle": "-|>",
        "mutation_scale": 13,
        "lw": 1.3,
        "color": INK,
        "shrinkA": 0,
        "shrinkB": 0,
    }
    ax.add_patch(FancyArrowPatch(start, end, **(options | style)))


def canvas(width: float, height: float) -> Axes:
    """A blank sheet in inches, origin at the lower left."""
    figure = plt.figure(figsize=(width, height), facecolor=PAPER)
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set(xlim=(0, width), ylim=(0, height))
    ax.axis("off")
    return ax
