"""The plot of a calibration: the share each head kept and its budget (Tangram, figure 5)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tangram.calibrate.observations import Observations, reserved_fractions

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ROW_HEADS = 96  # more boxes side by side are not readable on a page
_ROW_INCHES = 3.4


def plot_retention(evidence: Sequence[Observations], title: str) -> Figure:
    """Draw a box for each head and ρ, heads with the most pages first, in as many rows as needed.

    A box spans the quartiles of a head's shares over samples, its whiskers the range. Dots are the
    means of each kind of text. The line is what `sealed_pages` reserves.
    """
    from matplotlib.figure import Figure

    rows = [(entry, heads) for entry in evidence for heads in _rows(entry)]
    picture = Figure(figsize=(16, _ROW_INCHES * len(rows) + 0.6), layout="constrained")
    for axes, (entry, heads) in zip(
        np.atleast_1d(picture.subplots(len(rows), 1, squeeze=True)), rows, strict=True
    ):
        _boxes(axes, entry, heads)
        axes.set(
            ylabel=f"share kept, ρ {entry.profile.kv_retention:g}",
            xlim=(-1, _widest(entry)),
            ylim=(0, 1.02),
        )
    picture.axes[0].legend(loc="upper right", ncols=5, fontsize=7)
    picture.axes[-1].set_xlabel("layer.head, most reserved first")
    picture.suptitle(title, fontsize=10)
    return picture


def _rows(entry: Observations) -> list[npt.NDArray[np.intp]]:
    """Flat numbers of the heads in rows of one length, by reserved and then by kept share."""
    order = np.lexsort(
        (-entry.fractions.mean(axis=0).ravel(), -reserved_fractions(entry.profile).ravel())
    )
    return np.array_split(order, -(-order.size // _ROW_HEADS))


def _widest(entry: Observations) -> int:
    return max(len(heads) for heads in _rows(entry))


def _boxes(axes: Any, entry: Observations, heads: npt.NDArray[np.intp]) -> None:
    """One row of heads."""
    shares = entry.fractions.reshape(len(entry.kinds), -1)[:, heads]
    places = np.arange(heads.size)
    axes.boxplot(
        shares,
        positions=places,
        widths=0.6,
        whis=(0, 100),
        patch_artist=True,
        manage_ticks=False,
        boxprops={"facecolor": "0.85", "linewidth": 0.5},
        medianprops={"color": "0.2", "linewidth": 1},
        whiskerprops={"linewidth": 0.5},
        capprops={"linewidth": 0.5},
    )
    for kind, colour in _colours(entry.kinds).items():
        axes.scatter(
            places,
            shares[entry.of_kind(kind)].mean(axis=0),
            s=7,
            color=colour,
            zorder=3,
            label=kind,
        )
    edges = np.arange(heads.size + 1) - 0.5
    axes.stairs(
        reserved_fractions(entry.profile).ravel()[heads],
        edges,
        color="black",
        linewidth=1.4,
        zorder=4,
        label="reserved",
    )
    layers, columns = entry.profile.layers, entry.profile.model.kv_heads
    names = [f"{layers[head // columns]}.{head % columns}" for head in heads]
    axes.set_xticks(places, names, rotation=90, fontsize=6)
    axes.grid(axis="y", alpha=0.3)


def _colours(kinds: Sequence[str]) -> dict[str, Any]:
    from matplotlib import colormaps

    named = list(dict.fromkeys(kinds))
    return {
        kind: colormaps["turbo"]((index + 0.5) / len(named)) for index, kind in enumerate(named)
    }
