"""`tfdist bench latency`: the time of a tiny all-reduce, eager and inside `tf.function`.

An eager collective of tfdist is agreed on first (names, shapes and operations of all ranks are compared), a
round trip to rank 0; inside a graph that happened when it was traced.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence

from tfdist.bench import report
from tfdist.bench.engines import ENGINES, EngineWorld, available_engines, select
from tfdist.bench.figures import table
from tfdist.bench.worlds import closing_all, take_turns

_BYTES = 4
_MODES = ("eager", "graph")


def main(argv: Sequence[str]) -> int:
    """Command line of `tfdist bench latency`; see `tfdist.bench.main`."""
    options = _parser().parse_args(argv)
    engines, missing = available_engines()
    if any(engine.name == "horovod" for engine in engines):
        engines.append(EngineWorld("raw", "Horovod over Gloo, without tfdist"))
    if options.only:
        engines, missing = select(engines, options.only), []
    report.introduce("latency")
    for text in missing:
        print(f"Left out: {text}")
    seconds = _measure(engines, options)
    print(f"\n{latency_table(seconds)}")
    settings = {name: getattr(options, name) for name in ("np", "repeat", "rounds")}
    report.finish(options.json, settings=settings, figures={"seconds": seconds})
    return 0


def latency_table(seconds: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """Engines down, eager and graph across, in milliseconds."""
    rows = [
        [label, *(f"{1e3 * statistics.median(by_mode[mode]):.2f}" for mode in _MODES)]
        for label, by_mode in seconds.items()
    ]
    return table(["ms, one float32", "eager", "in tf.function"], rows)


def _measure(
    engines: Sequence[EngineWorld], options: argparse.Namespace
) -> dict[str, dict[str, list[float]]]:
    seconds: dict[str, dict[str, list[float]]] = {}
    with closing_all([]) as worlds:
        for engine in engines:
            print(f"starting: {engine.label}, {options.np} ranks", flush=True)
            worlds.append(engine.start(options.np, timeout=options.timeout))
        for mode in _MODES:
            request = {"bytes": _BYTES, "repeat": options.repeat, "mode": mode}
            rounds = take_turns(worlds, request, rounds=options.rounds)
            for engine, answers in zip(engines, rounds, strict=True):
                seconds.setdefault(engine.label, {})[mode] = [max(ranks) for ranks in answers]
    return seconds


def _parser() -> argparse.ArgumentParser:
    parser = report.parser("latency", "Time of an all-reduce of one float32.")
    add = parser.add_argument
    add("-np", "--np", type=report.at_least(2), default=2, metavar="N", help="ranks (2)")
    add("--repeat", type=report.at_least(1), default=100, metavar="T", help="all-reduces a round (100)")
    add("--rounds", type=report.at_least(1), default=9, metavar="R", help="rounds (9)")
    add(
        "--only", nargs="+", choices=(*ENGINES, "raw"), metavar="ENGINE", help=f"of {', '.join(ENGINES)}, raw"
    )
    return parser
