"""Draws peaks of training: bars for each network, and growth with depth on logarithmic axes."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

# Okabe and Ito: apart for the colour-blind and in grey.
_BAR, _LINES = "#0072B2", (("#D55E00", "s"), ("#009E73", "^"))


def draw(
    figures: Mapping[str, Mapping[str, Mapping[str, Any]]],
    growth: Mapping[str, Mapping[int, int]],
    file: pathlib.Path,
) -> None:
    """Writes the plot.

    Args:
        figures: network and mode -> contender -> figures with a `peak` in bytes, or without one if it failed.
        growth: contender -> depth -> peak in bytes; empty for none.
        file: where to; its ending chooses the format.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        panels = len(figures) + bool(growth)
        figure = Figure(figsize=(3.4 * panels + 0.6, 3.6), layout="constrained", dpi=150)
        axes = figure.subplots(1, panels, squeeze=False)[0]
        for panel, (name, measured) in zip(axes, figures.items(), strict=False):
            peaks = {contender: each["peak"] / 1e6 for contender, each in measured.items() if "peak" in each}
            bars = panel.bar(list(peaks), list(peaks.values()), color=_BAR)
            panel.bar_label(bars, fmt="%.0f", fontsize=7.5)
            panel.tick_params(axis="x", rotation=60)
            panel.set_title(name, fontsize=9.5, loc="left")
            panel.set_ylabel("peak above start, MB")
        if growth:
            panel = axes[-1]
            for (name, by_depth), (colour, marker) in zip(growth.items(), _LINES, strict=False):
                values = [peak / 1e6 for peak in by_depth.values()]
                panel.plot(list(by_depth), values, color=colour, marker=marker, label=name)
            panel.set_xscale("log", base=2)
            panel.set_yscale("log", base=2)
            panel.set_xlabel("depth")
            panel.set_title("growth", fontsize=9.5, loc="left")
            panel.legend(frameon=False)
        figure.savefig(file)
