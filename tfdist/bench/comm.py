"""`tfdist bench comm`: what each strategy sends and how long that takes, beside the models of `tfdist.cost`.

An update of K bytes of weights by SGD, with nothing to compute before: what remains is communication. One process
does the same update without any, and its time is taken off.

Processes of one machine share its cores and its memory, so the model for it has one link that all ranks share; how
fast that is, is taken from the ring of the fewest ranks, and the others are predicted. Machines in a cluster each
have a link, and there the strategies part: the picture's other half, by the model alone.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
from collections.abc import Mapping, Sequence

from tfdist import cost
from tfdist.bench import report
from tfdist.bench.allreduce import require_matplotlib
from tfdist.bench.comm_ranks import VARIABLES
from tfdist.bench.engines import available_engines
from tfdist.bench.figures import table
from tfdist.bench.machine import load
from tfdist.bench.worlds import World, closing_all
from tfdist.errors import TfdistError

_BLOCK = 4 * VARIABLES * 1024  # bytes; sizes are rounded to it, so that variables are equal
_SMALLEST = _BLOCK  # bytes of the update whose time is all latency
_TURN = 0.4  # seconds that one turn should take
_MOST_REPEATS = 200
_COUNTED = 4  # updates over which bytes are counted
ALONE = "one process"
RING, ONE, ALL = "ring", "parameter_server(servers=1)", "parameter_server(servers=N)"

# number of ranks -> strategy -> bytes of the weights -> one figure
Figures = dict[int, dict[str, dict[int, float]]]


def main(argv: Sequence[str]) -> int:
    """Command line of `tfdist bench comm`; see `tfdist.bench.main`."""
    options = _parser().parse_args(argv)
    if options.plot:
        require_matplotlib()
    engine = _engine(options.engine)
    report.introduce("comm")
    sizes = [_round(size) for size in options.sizes]
    sent: Figures = {}
    seconds: Figures = {}
    for ranks in options.np:
        sent[ranks], seconds[ranks] = _measure(engine, ranks, [_SMALLEST, *sizes], options)
    link = fit_link(seconds, smallest=_SMALLEST, largest=max(sizes))
    for size in sizes:
        print(f"\n{megabytes(size)} of weights, engine {engine}\n\n{comm_table(sent, seconds, size, link)}")
    print(
        f"\nThe model's link, shared by all ranks, from the ring of {min(options.np)}: latency "
        f"{1e6 * link.latency:.0f} us, {link.bandwidth / 1e9:.2f} GB/s."
    )
    if options.plot:
        from tfdist.bench.comm_plot import draw

        cluster = cost.Link(options.latency * 1e-6, options.bandwidth * 1e9)
        draw(seconds, max(sizes), link, cluster, options.plot)
        print(f"Plot: {options.plot}")
    report.finish(
        options.json,
        settings={"np": options.np, "sizes": sizes, "rounds": options.rounds, "engine": engine},
        figures={"sent": sent, "seconds": seconds},
    )
    return 0


def predicted(strategy: str, ranks: int, size: int, link: cost.Link) -> cost.Traffic:
    """The model's traffic of an update under one of the measured strategies."""
    if strategy == RING:
        return cost.ring(ranks, size, link)
    return cost.parameter_server(ranks, size, link, servers=1 if strategy == ONE else ranks)


def megabytes(size: int) -> str:
    """For people: sizes are rounded to whole variables."""
    return f"{size / 2**20:.1f} MB"


def fit_link(
    seconds: Mapping[int, Mapping[str, Mapping[int, float]]], *, smallest: int, largest: int
) -> cost.Link:
    """The shared link with which the model gives the ring of the fewest ranks its measured times.

    Args:
        seconds: number of ranks -> strategy -> bytes -> seconds of communication.
        smallest: bytes of an update that takes hardly more than latency.
        largest: bytes of one that takes hardly any.
    """
    ring = seconds[min(seconds)][RING]
    return cost.fitted_link(min(seconds), largest, latency=ring[smallest], seconds=ring[largest], shared=True)


def comm_table(
    sent: Mapping[int, Mapping[str, Mapping[int, float]]],
    seconds: Mapping[int, Mapping[str, Mapping[int, float]]],
    size: int,
    link: cost.Link,
) -> str:
    """Ranks and strategies down; bytes and times, measured and by the model, across."""
    rows = []
    for ranks, strategies in sent.items():
        for strategy in strategies:
            model = predicted(strategy, ranks, size, link)
            bytes_, time = strategies[strategy][size], seconds[ranks][strategy][size]
            rows.append(
                [
                    f"{ranks}, {strategy}",
                    f"{bytes_ / 2**20:.2f}",
                    f"{model.sent / 2**20:.2f}",
                    f"{bytes_ / model.sent:.3f}",
                    f"{1e3 * time:.2f}",
                    f"{1e3 * model.seconds:.2f}",
                ]
            )
    head = ["ranks, strategy", "MB sent, busiest rank", "model", "ratio", "ms", "model"]
    return table(head, rows)


def _measure(
    engine: str, ranks: int, sizes: Sequence[int], options: argparse.Namespace
) -> tuple[dict[str, dict[int, float]], dict[str, dict[int, float]]]:
    """Bytes that the busiest rank sends, and seconds of communication: by strategy and size."""
    strategies = [RING, ONE, ALL]
    with closing_all([]) as worlds:
        for strategy in [ALONE, *strategies]:
            print(f"starting: {strategy.replace('N', str(ranks))}, {ranks} ranks", flush=True)
            worlds.append(_start(engine, strategy, ranks, options))
            worlds[-1].pause()
        print(f"{options.rounds} rounds, load {load():.1f}", flush=True)
        others = worlds[1:]
        sent: dict[str, dict[int, float]] = {strategy: {} for strategy in strategies}
        seconds: dict[str, dict[int, float]] = {strategy: {} for strategy in strategies}
        for size in sizes:
            for strategy, world in zip(strategies, others, strict=True):
                request = {"bytes": size, "repeat": _COUNTED, "count": True}
                sent[strategy][size] = max(world.turn(request))
            rounds: list[list[float]] = [[] for _ in worlds]
            repeats = [_repeats(world, size) for world in worlds]
            for _ in range(options.rounds):
                for place, world in enumerate(worlds):
                    request = {"bytes": size, "repeat": repeats[place], "count": False}
                    rounds[place].append(max(world.turn(request)))
            # The fastest round: other programs only take away.
            without = min(rounds[0])
            for strategy, times in zip(strategies, rounds[1:], strict=True):
                seconds[strategy][size] = min(times) - without
    return sent, seconds


def _repeats(world: World, size: int) -> int:
    """How often to repeat for a turn of about `_TURN` seconds, from one trial."""
    trial: float = statistics.fmean(world.turn({"bytes": size, "repeat": 2, "count": False}))
    return max(2, min(_MOST_REPEATS, round(_TURN / trial)))


def _start(engine: str, strategy: str, ranks: int, options: argparse.Namespace) -> World:
    alone = strategy == ALONE
    return World(
        f"{strategy}, {ranks} ranks",
        1 if alone else ranks,
        module="tfdist.bench.comm_ranks",
        options={"np": 1 if alone else ranks, "backend": engine},
        variables={"TFDIST_STRATEGY": RING if alone else strategy.replace("N", str(ranks))}
        | report.thread_share(ranks),
        backend="tf" if alone else engine,
        timeout=options.timeout,
    )


def _engine(asked: str | None) -> str:
    here = [engine.name for engine in available_engines()[0] if engine.name in ("tf", "horovod")]
    if asked is not None and asked not in here:
        raise TfdistError(
            f"--engine {asked} can't be measured here, only {', '.join(here)}. `tfdist doctor` says why."
        )
    return asked or here[-1]


def _round(size: int) -> int:
    """The next multiple of `_BLOCK`, so that all variables are equal."""
    return -(-size // _BLOCK) * _BLOCK


def _parser() -> argparse.ArgumentParser:
    parser = report.parser("comm", "Bytes and time of an update under each strategy, beside the model.")
    add = parser.add_argument
    add(
        "-np",
        "--np",
        nargs="+",
        type=report.at_least(2),
        default=[2, 3, 4],
        metavar="N",
        help="ranks (2 3 4)",
    )
    add(
        "--sizes", nargs="+", type=report.size, default=[report.size(text) for text in ("1MB", "8MB", "64MB")],
        metavar="K", help="bytes of weights (1MB 8MB 64MB)",
    )  # fmt: skip
    add("--rounds", type=report.at_least(1), default=7, metavar="R", help="rounds (7)")
    add("--engine", choices=("tf", "horovod"), help="default: Horovod if it is installed")
    add("--plot", type=pathlib.Path, metavar="FILE", help="draw time over ranks into FILE (.png, .svg, .pdf)")
    add("--latency", type=float, default=50.0, metavar="US", help="of a cluster's link, for the plot (50 us)")
    add("--bandwidth", type=float, default=1.25, metavar="GB", help="of a cluster's link, GB/s (1.25)")
    return parser
