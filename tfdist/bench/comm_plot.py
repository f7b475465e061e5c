"""Draws the time of an update over the number of ranks: measured on one machine, and by the model to 1,024."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping

from tfdist import cost
from tfdist.bench.comm import ALL, ONE, RING, megabytes, predicted

# Colours that stay apart for the colour-blind and in grey (Okabe and Ito), each with a marker of its own.
# Dashes, where one line lies on another.
_STYLES = {RING: ("#0072B2", "o", "-"), ONE: ("#D55E00", "s", "-"), ALL: ("#009E73", "^", "--")}
_MOST_RANKS = 1024


def draw(
    seconds: Mapping[int, Mapping[str, Mapping[int, float]]],
    size: int,
    here: cost.Link,
    cluster: cost.Link,
    file: pathlib.Path,
) -> None:
    """Writes the plot.

    Args:
        seconds: number of ranks -> strategy -> bytes of the weights -> seconds of communication, measured.
        size: bytes of the weights to draw.
        here: link of the machine that was measured.
        cluster: of each machine of a cluster.
        file: where to; its ending chooses the format.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(9.8, 4.2), layout="constrained", dpi=150)
        left, right = figure.subplots(1, 2)
        for strategy, (colour, marker, line) in _STYLES.items():
            left.plot(
                list(seconds),
                [1e3 * by_strategy[strategy][size] for by_strategy in seconds.values()],
                color=colour,
                marker=marker,
                markersize=5,
                linewidth=1.2,
                linestyle=line,
                label=f"{strategy}, measured",
            )
            ranks = [2**power for power in range(1, _MOST_RANKS.bit_length())]
            right.plot(
                ranks,
                [1e3 * predicted(strategy, count, size, cluster).seconds for count in ranks],
                color=colour,
                marker=marker,
                markersize=4,
                linewidth=1.6,
                linestyle=line,
                label=strategy,
            )
        counts = range(1, max(seconds) + 1)
        left.plot(
            list(counts),
            [1e3 * predicted(RING, count, size, here).seconds for count in counts],
            color="#666666",
            linewidth=1,
            linestyle=(0, (5, 3)),
            zorder=0,
            label="model: all move 2(N-1)K bytes through one machine",
        )
        left.set_xticks(list(counts))
        left.set_ylim(bottom=0, top=1.4 * left.get_ylim()[1])  # room for the legend
        left.set_xlabel("processes on this machine")
        left.set_title(f"{megabytes(size)} of weights, one machine", fontsize=11, loc="left")
        right.set_xscale("log", base=2)
        right.set_yscale("log")
        right.set_xticks([2, 8, 32, 128, 512, _MOST_RANKS], ["2", "8", "32", "128", "512", "1024"])
        right.minorticks_off()
        right.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        right.set_xlabel("machines, each with its own link (model)")
        right.set_title(
            f"a cluster: {cluster.bandwidth / 1e9:g} GB/s, {1e6 * cluster.latency:g} us a message",
            fontsize=11,
            loc="left",
        )
        for panel in (left, right):
            panel.grid(color="#dddddd", linewidth=0.6)
            panel.set_axisbelow(True)
            panel.set_ylabel("ms of communication in a step")
            panel.legend(loc="upper left", frameon=False, fontsize=8.5)
        figure.savefig(file)
