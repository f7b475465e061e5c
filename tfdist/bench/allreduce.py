"""`tfdist bench allreduce`: bus bandwidth of every engine by size, beside the machine's own limits."""

from __future__ import annotations

import argparse
import importlib.util
import pathlib
import statistics
from collections.abc import Mapping, Sequence

from tfdist import resources
from tfdist.bench import report
from tfdist.bench.engines import ENGINES, UNSPLIT, EngineWorld, available_engines, select
from tfdist.bench.figures import bus_bandwidth, describe_size, table
from tfdist.bench.limits import copy_bandwidth, tcp_bandwidth
from tfdist.bench.machine import load
from tfdist.bench.worlds import World, closing_all
from tfdist.errors import TfdistError

_SIZES = tuple(1 << power for power in range(10, 29, 2))  # 1 KB to 256 MB
_TURN = 0.15  # seconds that one turn should take
_MOST_REPEATS = 300
# Bytes that a rank holds: TensorFlow and an engine's buffers; and, in its turn, so many times the tensor.
_AT_REST = 700 << 20
_TENSORS = 6

# engine's label -> size in bytes -> seconds of one all-reduce, by round
Seconds = Mapping[str, Mapping[int, Sequence[float]]]


def main(argv: Sequence[str]) -> int:
    """Command line of `tfdist bench allreduce`; see `tfdist.bench.main`."""
    options = _parser().parse_args(argv)
    if options.plot:
        require_matplotlib()
    engines, missing = available_engines()
    if options.only:
        engines, missing = select([*engines, UNSPLIT], options.only), []
    report.introduce("allreduce")
    for text in missing:
        print(f"Left out: {text}")
    tcp, copy = [tcp_bandwidth()], [copy_bandwidth()]
    seconds: dict[int, Seconds] = {}
    for size in options.np:
        seconds[size] = _measure(engines, size, options)
        tcp.append(tcp_bandwidth())
        copy.append(copy_bandwidth())
    limits = {"one TCP stream": max(tcp), "memory copy": max(copy)}
    bandwidths = {size: bandwidths_of(seconds[size], ranks=size) for size in options.np}
    for size in options.np:
        print(f"\n{size} ranks: bus bandwidth, 2(N-1)/N·K/t\n\n{bandwidth_table(bandwidths[size])}")
        for text in _split_ratios(seconds[size]):
            print(text)
    described = ", ".join(f"{name} {value / 1e9:.2f} GB/s" for name, value in limits.items())
    print(f"\nLimits of this machine in the same run: {described}")
    if options.plot:
        from tfdist.bench.allreduce_plot import draw

        draw(bandwidths, limits, options.plot)
        print(f"Plot: {options.plot}")
    report.finish(
        options.json,
        settings={"np": options.np, "sizes": options.sizes, "rounds": options.rounds},
        figures={"seconds": seconds, "bandwidths": bandwidths, "tcp": tcp, "copy": copy},
    )
    return 0


def bandwidths_of(seconds: Seconds, *, ranks: int) -> dict[str, dict[int, float]]:
    """Bus bandwidth by engine and size, from the fastest of the rounds.

    What a machine gives is bounded above, and everything else that runs only takes away from it.
    """
    return {
        label: {
            size: bus_bandwidth(size, ranks=ranks, seconds=min(rounds)) for size, rounds in by_size.items()
        }
        for label, by_size in seconds.items()
    }


def bandwidth_table(bandwidths: Mapping[str, Mapping[int, float]]) -> str:
    """Sizes down, engines across, in GB/s."""
    sizes = list(next(iter(bandwidths.values())))
    rows = [
        [describe_size(size), *(f"{by_size[size] / 1e9:.3g}" for by_size in bandwidths.values())]
        for size in sizes
    ]
    return table(["GB/s", *bandwidths], rows)


def _split_ratios(seconds: Seconds) -> list[str]:
    """How much splitting saves, by size, if both ways were measured: median of the rounds' ratios."""
    split, whole = seconds.get("TensorFlow's collectives"), seconds.get(UNSPLIT.label)
    if split is None or whole is None:
        return []
    return [
        f"{describe_size(size)}: time in parts / time in one piece "
        f"{statistics.median(a / b for a, b in zip(split[size], whole[size], strict=True)):.2f}"
        for size in split
    ]


def require_matplotlib() -> None:
    """Refuses to measure for minutes what can't be drawn afterwards.

    Raises:
        TfdistError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise TfdistError(
            "--plot draws with matplotlib, which is not installed: `pip install 'tfdist[plot]'`, or leave "
            "--plot out; the table needs nothing."
        )


def _measure(engines: Sequence[EngineWorld], size: int, options: argparse.Namespace) -> Seconds:
    """In turns if the memory suffices for all engines' worlds at once, else one engine after the other."""
    if memory_for(len(engines), size, options.sizes) > 0.8 * resources.free_memory() > 0:
        one = memory_for(1, size, options.sizes)
        if one > 0.8 * resources.free_memory():
            raise TfdistError(
                f"{size} ranks need some {one / 1e9:.1f} GB for tensors of {describe_size(max(options.sizes))}, "
                f"and {resources.free_memory() / 1e9:.1f} GB are free: choose smaller --sizes or fewer ranks (-np)."
            )
        print("Too little memory for all engines at once: they are measured one after the other.")
        result: dict[str, Mapping[int, Sequence[float]]] = {}
        for engine in engines:
            result.update(_measure_together([engine], size, options))
        return result
    return _measure_together(engines, size, options)


def memory_for(engines: int, ranks: int, sizes: Sequence[int]) -> int:
    """Bytes that the worlds of some engines need, only one of which has its turn."""
    return ranks * (engines * _AT_REST + _TENSORS * max(sizes))


def _measure_together(engines: Sequence[EngineWorld], size: int, options: argparse.Namespace) -> Seconds:
    seconds: dict[str, dict[int, list[float]]] = {engine.label: {} for engine in engines}
    with closing_all([]) as worlds:
        for engine in engines:
            print(f"starting: {engine.label}, {size} ranks", flush=True)
            worlds.append(engine.start(size, timeout=options.timeout))
        print(f"{options.rounds} rounds, load {load():.1f}", flush=True)
        repeats = {(world, number): _repeats(world, number) for number in options.sizes for world in worlds}
        # All sizes in every round: what disturbs the machine for a while then spoils one round of each size
        # rather than all rounds of one.
        for _ in range(options.rounds):
            for number in options.sizes:
                for engine, world in zip(engines, worlds, strict=True):
                    answers = world.turn({"bytes": number, "repeat": repeats[world, number], "mode": "graph"})
                    # The slowest rank has waited for nobody: its time is the collective's.
                    seconds[engine.label].setdefault(number, []).append(max(answers))
    return seconds


def _repeats(world: World, number: int) -> int:
    """How often to repeat for a turn of about `_TURN` seconds, from one trial, which also warms up."""
    trial: float = max(world.turn({"bytes": number, "repeat": 2, "mode": "graph"}))
    return max(1, min(_MOST_REPEATS, round(_TURN / trial)))


def _parser() -> argparse.ArgumentParser:
    parser = report.parser("allreduce", "Bus bandwidth of all-reduce by engine and size of the tensor.")
    add = parser.add_argument
    add("-np", "--np", nargs="+", type=report.at_least(2), default=[2, 4], metavar="N", help="ranks (2 4)")
    add(
        "--sizes",
        nargs="+",
        type=report.size,
        default=list(_SIZES),
        metavar="K",
        help="1KB to 256MB by default",
    )
    add("--rounds", type=report.at_least(1), default=9, metavar="R", help="rounds (9)")
    add("--plot", type=pathlib.Path, metavar="FILE", help="draw the figures into FILE (.png, .svg, .pdf)")
    add("--only", nargs="+", choices=ENGINES, metavar="ENGINE", help=f"of {', '.join(ENGINES)}")
    return parser
