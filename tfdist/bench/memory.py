"""`tfdist bench memory`: peak memory and step time of training, plain, recomputed, in slices, and both.

Problem: a process that has once taken memory does not show how little it would do with.

Solution: each figure is of a process of its own. Memory counts above the level after a step with a few rows, so
graphs and compiled code don't count, and activations do.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.bench import report
from tfdist.bench.allreduce import require_matplotlib
from tfdist.bench.figures import table
from tfdist.bench.memory_networks import NETWORKS, USUAL

CONTENDERS = {
    "plain": "plain",
    "remat": "keras.RematScope, all layers",
    "each": "recompute, each layer",
    "sqrt": "recompute_model",
    "k=2": "accumulate_gradients, 2 slices",
    "k=4": "4 slices",
    "k=8": "8 slices",
    "k=16": "16 slices",
    "both": "recompute_model and 8 slices",
}
# Contender -> jit -> bound of its peak over the plain one's.
_TARGETS = {"sqrt": (0.30, 0.35), "k=8": (0.20, 0.30), "both": (0.10, 0.22)}
_TIMES = ("seconds", "cpu")
_GROWTH = ("plain", "sqrt")


def main(argv: Sequence[str]) -> int:
    """Command line of `tfdist bench memory`; see `tfdist.bench.main`."""
    options = _parser().parse_args(argv)
    if options.plot is not None:
        require_matplotlib()
    report.introduce("memory")
    figures: dict[str, Any] = {}
    for network in options.networks:
        for jit in options.jit:
            measured = _measure(network, jit, options)
            name = f"{network}, jit_compile={jit}"
            figures[name] = measured
            print(f"\n{name}\n\n{memory_table(measured, jit=jit)}", flush=True)
    growth: dict[str, dict[int, int]] = {}
    if options.depths:
        growth = _measure_growth(options)
        print(f"\nGrowth of {options.networks[0]} with depth\n\n{growth_table(growth)}")
    if options.plot is not None:
        from tfdist.bench.memory_plot import draw

        draw(figures, growth, options.plot)
    settings = {
        name: getattr(options, name) for name in ("networks", "jit", "steps", "only", "depths", "rows")
    }
    report.finish(options.json, settings=settings, figures={"steps": figures, "growth": growth})
    return (
        0
        if any("peak" in each for measured in figures.values() for each in measured.values()) or growth
        else 1
    )


def memory_table(measured: Mapping[str, Mapping[str, Any]], *, jit: bool) -> str:
    """Contenders down; peak, and peak and times over those of plain training, across."""
    plain = measured.get("plain", {})
    rows = []
    for contender, figures in measured.items():
        if "peak" not in figures:
            rows.append([CONTENDERS[contender], "fails", "", "", "", ""])
            continue
        row = [CONTENDERS[contender], f"{figures['peak'] / 1e6:.0f}", "", "", "", ""]
        if "peak" in plain:
            ratio = figures["peak"] / plain["peak"]
            bound = _TARGETS[contender][jit] if contender in _TARGETS else None
            verdict = "" if bound is None else f"<= {bound}, {'met' if ratio <= bound else 'missed'}"
            times = [statistics.median(figures[kind]) / statistics.median(plain[kind]) for kind in _TIMES]
            row[2:] = [f"{ratio:.2f}", *(f"{time:.2f}" for time in times), verdict]
        rows.append(row)
    return table(["", "peak, MB", "/ plain", "time / plain", "of CPU", "target of the peak"], rows)


def growth_table(growth: Mapping[str, Mapping[int, int]]) -> str:
    """Depths down; peaks and the exponent of their growth."""
    depths = sorted({depth for peaks in growth.values() for depth in peaks})
    rows = [
        [
            str(depth),
            *(f"{growth[name][depth] / 1e6:.0f}" if depth in growth[name] else "fails" for name in growth),
        ]
        for depth in depths
    ]
    rows.append(["exponent", *(f"{exponent(peaks):.2f}" for peaks in growth.values())])
    return table(["depth", *(f"{CONTENDERS[name]}, MB" for name in growth)], rows)


def exponent(peaks: Mapping[int, int]) -> float:
    """Slope of the logarithm of the peak over that of the depth: 0.5 for a root; NaN from fewer than two.

    Example:
        >>> round(exponent({16: 40, 64: 80, 256: 160}), 2)
        0.5
    """
    if len(peaks) < 2:
        return math.nan
    depths = [math.log(depth) for depth in peaks]
    return statistics.linear_regression(depths, [math.log(max(peak, 1)) for peak in peaks.values()]).slope


def _measure(network: str, jit: bool, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    depth, rows = USUAL[network]
    measured = {}
    for contender in options.only or CONTENDERS:
        request = {"network": network, "depth": options.depth or depth, "rows": options.rows or rows}
        request |= {"contender": contender, "jit": jit, "steps": options.steps}
        measured[contender] = _try(request, options.timeout)
        print(f"  {network}, jit_compile={jit}: {CONTENDERS[contender]}", flush=True)
    return measured


def _measure_growth(options: argparse.Namespace) -> dict[str, dict[int, int]]:
    network = options.networks[0]
    growth: dict[str, dict[int, int]] = {}
    for contender in _GROWTH:
        for depth in options.depths:
            request = {"network": network, "depth": depth, "rows": options.rows or USUAL[network][1]}
            request |= {"contender": contender, "jit": False, "steps": 1}
            figures = _try(request, options.timeout)
            if "peak" in figures:
                growth.setdefault(contender, {})[depth] = figures["peak"]
    return growth


def _try(request: Mapping[str, Any], timeout: float) -> dict[str, Any]:
    """Figures of one process, or what it said when it failed."""
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    words = [sys.executable, "-m", "tfdist.bench.memory_trial", json.dumps(request)]
    try:
        result = subprocess.run(
            words, capture_output=True, text=True, env=environment, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {timeout:g} s"}
    if result.returncode != 0:
        return {"error": "\n".join(result.stderr.splitlines()[-5:]) or f"ended with code {result.returncode}"}
    figures: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return figures


def _parser() -> argparse.ArgumentParser:
    parser = report.parser("memory", "Peak memory and step time of training in less memory.")
    add = parser.add_argument
    add("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS), help="all by default")
    add(
        "--jit", nargs="+", type=_flag, default=[False, True], metavar="BOOL", help="jit_compile (false true)"
    )
    add("--steps", type=report.at_least(1), default=4, metavar="S", help="timed steps (4)")
    add("--depth", type=report.at_least(1), metavar="N", help="layers or blocks")
    add("--rows", type=report.at_least(1), metavar="B", help="rows of a batch")
    add(
        "--depths", nargs="+", type=report.at_least(1), default=[], metavar="N", help="growth with depth, too"
    )
    add("--only", nargs="+", choices=CONTENDERS, metavar="CONTENDER", help=f"of {', '.join(CONTENDERS)}")
    add("--plot", type=pathlib.Path, metavar="FILE", help="draw the figures into FILE (.png, .svg, .pdf)")
    parser.set_defaults(timeout=900)
    return parser


def _flag(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"needs true or false, received {text!r}")
    return text.lower() == "true"
