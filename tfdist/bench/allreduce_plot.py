"""Draws bus bandwidth over size: one panel for each number of ranks, the machine's limits as dashed lines."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping

from tfdist.bench.figures import describe_size

# Colours that stay apart for the colour-blind and in grey (Okabe and Ito), each with a marker of its own.
_STYLES = (("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^"), ("#CC79A7", "D"))
_LIMIT = "#666666"


def draw(
    bandwidths: Mapping[int, Mapping[str, Mapping[int, float]]],
    limits: Mapping[str, float],
    file: pathlib.Path,
) -> None:
    """Writes the plot.

    Args:
        bandwidths: number of ranks -> engine -> bytes of the tensor -> bytes a second.
        limits: name -> bytes a second.
        file: where to; its ending chooses the format.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(4.6 * len(bandwidths) + 0.6, 4.2), layout="constrained", dpi=150)
        panels = figure.subplots(1, len(bandwidths), sharey=True, squeeze=False)[0]
        for panel, (ranks, engines) in zip(panels, bandwidths.items(), strict=True):
            sizes = sorted({size for by_size in engines.values() for size in by_size})
            for (label, by_size), (colour, marker) in zip(engines.items(), _STYLES, strict=False):
                panel.plot(
                    list(by_size),
                    [value / 1e9 for value in by_size.values()],
                    color=colour,
                    marker=marker,
                    markersize=4.5,
                    linewidth=1.6,
                    label=label,
                )
            panel.set_xscale("log", base=2)
            panel.set_yscale("log")
            for name, value in limits.items():
                panel.axhline(value / 1e9, color=_LIMIT, linewidth=1, linestyle=(0, (5, 3)), zorder=0)
                panel.annotate(
                    f"{name}, {value / 1e9:.1f} GB/s",
                    (sizes[0], value / 1e9),
                    xytext=(0, 3),
                    textcoords="offset points",
                    color=_LIMIT,
                    fontsize=8.5,
                )
            ticks = sizes[:: max(1, len(sizes) // 5)]
            panel.set_xticks(ticks, [describe_size(size) for size in ticks])
            panel.minorticks_off()
            panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            panel.grid(color="#dddddd", linewidth=0.6)
            panel.set_axisbelow(True)
            panel.set_title(f"{ranks} ranks", fontsize=11, loc="left")
            panel.set_xlabel("size of the tensor")
        panels[0].set_ylabel("bus bandwidth, GB/s")
        panels[-1].legend(loc="lower right", frameon=False, fontsize=9)
        figure.savefig(file)
