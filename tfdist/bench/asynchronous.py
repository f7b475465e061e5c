"""`tfdist bench asynchronous`: what a slow worker costs, and what `fit()` adds to a loop by hand.

    ring   synchronous, a rank for each worker: every step waits for the slowest
    fit    async_parameter_server in fit()
    loop   ParameterServerStrategy by hand, with a lock that makes it count right

A worker's computation is emulated: it waits `--pace` milliseconds in each step, and a slow one `--slow` times as
long. Processes of one machine share its cores, so that all of them would get slower if one did more; machines of a
cluster don't. What is measured is what the strategies make of it, with all that they send and apply; with
`--pace 0` nothing but that.

Rates are batches a second of all workers together. With all at full speed and with one slow, contenders take turns.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import tempfile
from collections.abc import Sequence

from tfdist.bench import report
from tfdist.bench.asynchronous_ranks import PACE
from tfdist.bench.figures import table
from tfdist.bench.fit import MODELS
from tfdist.bench.worlds import World, closing_all

_MODULE = "tfdist.bench.asynchronous_ranks"
_LABELS = {
    "ring": "ring, tfdist on TensorFlow's collectives",
    "fit": "async_parameter_server, fit()",
    "loop": "ParameterServerStrategy by hand, locked",
}
# (contender, reference, whether one worker is slow, target)
_COMPARISONS = (("fit", "ring", True, 1.3), ("fit", "loop", False, 1.0), ("fit", "loop", True, 1.0))


def main(argv: Sequence[str]) -> int:
    """Command line of `tfdist bench asynchronous`; see `tfdist.bench.main`."""
    options = _parser().parse_args(argv)
    report.introduce("asynchronous")
    seconds = _measure(options)
    rates = {
        key: [options.steps * (options.workers if key[0] == "ring" else 1) / each for each in rounds]
        for key, rounds in seconds.items()
    }
    head = ["batches a second", "all at full speed", f"one {options.slow:g}x slower"]
    rows = [
        [_LABELS[who], *(f"{statistics.median(rates[who, slow]):.1f}" for slow in (False, True))]
        for who in _LABELS
    ]
    print(f"\n{options.workers} workers, {options.model}, batch {options.batch}\n\n{table(head, rows)}\n")
    ratios = {}
    for who, reference, slow, target in _COMPARISONS:
        each = [a / b for a, b in zip(rates[who, slow], rates[reference, slow], strict=True)]
        ratio = statistics.median(each)
        name = f"{who} / {reference}{', one slow' if slow else ''}"
        ratios[name] = each
        print(
            f"{name}: {ratio:.2f} ({min(each):.2f} to {max(each):.2f}), target >= {target}: "
            f"{'met' if ratio >= target else 'missed'}"
        )
    report.finish(
        options.json,
        settings={
            name: getattr(options, name)
            for name in ("workers", "model", "batch", "steps", "rounds", "pace", "slow")
        },
        figures={
            "rates": {f"{who}{', one slow' if slow else ''}": each for (who, slow), each in rates.items()},
            "ratios": ratios,
        },
    )
    return 0


def _measure(options: argparse.Namespace) -> dict[tuple[str, bool], list[float]]:
    """Seconds of each round, by contender and whether a worker is slow."""
    seconds: dict[tuple[str, bool], list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="tfdist-bench-") as name, closing_all([]) as worlds:
        folder = pathlib.Path(name)
        for contender, size in (("ring", options.workers), ("served", options.workers + 2)):
            worlds.append(_start(contender, size, folder, options))
            worlds[-1].pause()
        ring, served = worlds
        request = {"kind": "request", "who": "ring", "steps": options.steps}
        for number in range(options.rounds):
            turns = [(who, slow) for slow in (False, True) for who in _LABELS]
            for who, slow in turns if number % 2 == 0 else reversed(turns):
                _set_pace(folder, ring if who == "ring" else served, options, slow=slow)
                if who == "ring":
                    took = max(ring.turn(request))
                else:
                    took = float(served.turn_of_first({**request, "who": who}))
                seconds.setdefault((who, slow), []).append(took)
    return seconds


def _start(contender: str, size: int, folder: pathlib.Path, options: argparse.Namespace) -> World:
    served = contender != "ring"
    return World(
        contender,
        size,
        module=_MODULE,
        options={
            "contender": contender,
            "model": options.model,
            "batch": options.batch,
            "steps": options.steps,
            "folder": str(folder),
        },
        variables={
            "CUDA_VISIBLE_DEVICES": "-1",
            **report.thread_share(options.workers),
            **({"TFDIST_STRATEGY": "async_parameter_server(servers=1)"} if served else {}),
        },
        backend="tf",
        timeout=float(options.timeout),
    )


def _set_pace(folder: pathlib.Path, world: World, options: argparse.Namespace, *, slow: bool) -> None:
    """Tells every rank of a world how long its steps wait; the last one is the slow one."""
    for rank in range(world.size):
        factor = options.slow if slow and rank == world.size - 1 else 1.0
        file = folder / world.name / str(rank) / PACE
        file.with_suffix(".new").write_text(str(int(1e3 * options.pace * factor)))
        file.with_suffix(".new").replace(file)


def _parser() -> argparse.ArgumentParser:
    parser = report.parser("asynchronous", "Asynchronous parameter servers with a slow worker.")
    parser.add_argument("--workers", type=report.at_least(2), default=2, metavar="W")
    parser.add_argument("--model", choices=MODELS, default="convnet")
    parser.add_argument("--batch", type=report.at_least(1), default=64, metavar="B", help="rows per worker")
    parser.add_argument("--steps", type=report.at_least(1), default=100, metavar="N", help="per round")
    parser.add_argument("--rounds", type=report.at_least(1), default=5, metavar="R")
    parser.add_argument("--pace", type=float, default=50.0, metavar="MS", help="computation of a step")
    parser.add_argument(
        "--slow", type=float, default=2.0, metavar="F", help="how much slower the slow worker is"
    )
    return parser
