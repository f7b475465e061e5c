"""`tfdist bench fit`: the time of a training step, beside the same by hand and beside peers."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.bench import report
from tfdist.bench.figures import Ratio, compare, ratio_table, table
from tfdist.bench.machine import load
from tfdist.bench.worlds import ContenderError, World, closing_all, take_turns
from tfdist.collectives.horovod_probe import installed_horovod
from tfdist.errors import TfdistError

_LEGACY = {"TF_USE_LEGACY_KERAS": "1"}
MODELS = ("mlp", "convnet")
_HOW_TO_GET = {
    "Horovod": "tfdist build-horovod",
    "tf_keras": "python -m pip install --no-deps tf_keras",
}


@dataclasses.dataclass(frozen=True)
class Contender:
    """Someone who trains.

    Attributes:
        label: for people.
        backend: engine, for contenders that use tfdist.
        needs: what must be installed, keys of `_HOW_TO_GET`.
        stoppable: whether it survives being stopped: TensorFlow's strategy counts silent workers as dead.
        alone: whether it is one process, with the threads of one rank.
        devices: whether it is one process, with a logical device and the threads for each rank.
        strategy: tfdist's; `{np}` stands for the number of ranks.
    """

    label: str
    backend: str | None = None
    needs: tuple[str, ...] = ()
    stoppable: bool = True
    alone: bool = False
    devices: bool = False
    strategy: str = "ring"


_ALL_SERVE = "parameter_server(servers={np})"
# In this order, so that those who are compared follow each other.
CONTENDERS = {
    "alone": Contender("Keras 3, one process", alone=True),
    "by-hand": Contender("Horovod ops in a hand-written loop", needs=("Horovod",)),
    "tfdist-horovod": Contender("tfdist on Horovod, fit()", "horovod", ("Horovod",)),
    "horovod-legacy": Contender("Horovod's wrapper, tf_keras fit()", None, ("Horovod", "tf_keras")),
    "tfdist-tf": Contender("tfdist on TensorFlow's collectives, fit()", "tf"),
    "mwms-legacy": Contender(
        "MultiWorkerMirroredStrategy, tf_keras fit()", None, ("tf_keras",), stoppable=False
    ),
    "multi_worker_mirrored": Contender(
        "tfdist multi_worker_mirrored, fit()", "tf", strategy="multi_worker_mirrored"
    ),
    "horovod-in-apply": Contender("Horovod ops in an optimizer's apply, fit()", None, ("Horovod",)),
    "callbacks": Contender(
        "tfdist on Horovod, fit() with callbacks.default(), all on", "horovod", ("Horovod",)
    ),
    "desync-check": Contender(
        "tfdist on Horovod, fit() with DesyncCheckCallback(100)", "horovod", ("Horovod",)
    ),
    "servers-horovod": Contender(
        "tfdist on Horovod, every rank a parameter server, fit()",
        "horovod",
        ("Horovod",),
        strategy=_ALL_SERVE,
    ),
    "servers-tf": Contender(
        "tfdist on TensorFlow's collectives, every rank a parameter server, fit()", "tf", strategy=_ALL_SERVE
    ),
}

for _name, _kind in (("mirrored", "MirroredStrategy"), ("central_storage", "CentralStorageStrategy")):
    CONTENDERS[_name] = Contender(
        f"tfdist {_name}, fit()", "single", devices=True, strategy=f"{_name}(devices={{np}})"
    )
    CONTENDERS[f"{_name}-legacy"] = Contender(f"{_kind}, tf_keras fit()", None, ("tf_keras",), devices=True)

# The others explain the first ratio, and what callbacks and strategies cost.
_USUAL = ("alone", "by-hand", "tfdist-horovod", "horovod-legacy", "tfdist-tf", "mwms-legacy")
_CHECKING = ("callbacks", "desync-check")
_CHECKS_EVERY = 100  # steps, the default of `DesyncCheckCallback`

# (contender, reference, target)
_COMPARISONS = (
    ("tfdist-horovod", "by-hand", 1.03),
    ("tfdist-horovod", "horovod-legacy", 1.00),
    ("tfdist-tf", "mwms-legacy", 1.00),
    ("tfdist-horovod", "horovod-in-apply", None),
    ("horovod-in-apply", "by-hand", None),
    ("multi_worker_mirrored", "mwms-legacy", 1.00),
    ("mirrored", "mirrored-legacy", 1.00),
    ("central_storage", "central_storage-legacy", 1.00),
    ("callbacks", "tfdist-horovod", 1.02),
    ("desync-check", "tfdist-horovod", 1.01),
    ("servers-horovod", "tfdist-horovod", 1.15),
    ("servers-tf", "tfdist-tf", 1.15),
)


def main(argv: Sequence[str]) -> int:
    """Command line of `tfdist bench fit`; see `tfdist.bench.main`."""
    parser = _parser()
    options = parser.parse_args(argv)
    names = options.only or _USUAL
    if options.steps % _CHECKS_EVERY and not set(names).isdisjoint(_CHECKING):
        parser.error(
            f"ranks are compared every {_CHECKS_EVERY} steps, so a round needs a multiple of that: "
            f"--steps {_CHECKS_EVERY}, not {options.steps}"
        )
    chosen, missing = choose(names)
    for what, labels in missing.items():
        print(f"{what} is not installed, so these are left out: {'; '.join(labels)}.")
        print(f"  To measure them: {_HOW_TO_GET[what]}")
    if not chosen:
        raise TfdistError("Nothing is left to measure.")
    answers = _measure(chosen, options)
    # All ranks of a world end a block together, but for noise; the last one counts. Processor time is the
    # ranks' mean.
    times = {name: [max(a["seconds"] for a in one) for one in rounds] for name, rounds in answers.items()}
    cpu = {
        name: [statistics.fmean(a["cpu"] for a in one) for one in rounds] for name, rounds in answers.items()
    }
    milliseconds = {name: [1e3 * s / options.steps for s in rounds] for name, rounds in times.items()}
    processor = {name: [1e3 * s / options.steps for s in rounds] for name, rounds in cpu.items()}
    ratios, processor_ratios = ratios_of(times), ratios_of(cpu)
    print(f"\n{_step_table(milliseconds, processor)}")
    if ratios:
        print(f"\n{ratio_table(ratios, processor_ratios)}")
    report.finish(
        options.json,
        settings={name: getattr(options, name) for name in ("model", "np", "batch", "steps", "rounds")},
        figures={
            "milliseconds_per_step": milliseconds,
            "cpu_milliseconds_per_step": processor,
            "ratios": {name: dataclasses.asdict(r) for name, r in ratios.items()},
            "cpu_ratios": {name: dataclasses.asdict(r) for name, r in processor_ratios.items()},
        },
    )
    return 0


def choose(names: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Those that can be measured here, in the order of `CONTENDERS`, and what is missing for whom."""
    absent = set()
    horovod = installed_horovod()
    if horovod is None or not horovod.usable:
        absent.add("Horovod")
    if importlib.util.find_spec("tf_keras") is None:
        absent.add("tf_keras")
    chosen, missing = [], {what: [] for what in _HOW_TO_GET if what in absent}  # type: ignore[var-annotated]
    for name, contender in CONTENDERS.items():
        if name not in names:
            continue
        lacking = absent.intersection(contender.needs)
        for what in lacking:
            missing[what].append(contender.label)
        if not lacking:
            chosen.append(name)
    return chosen, {what: labels for what, labels in missing.items() if labels}


def ratios_of(times: Mapping[str, Sequence[float]]) -> dict[str, Ratio]:
    """The comparisons whose both sides were measured."""
    return {
        f"{CONTENDERS[one].label} / {CONTENDERS[other].label}": compare(
            times[one], times[other], target=target
        )
        for one, other, target in _COMPARISONS
        if one in times and other in times
    }


def _measure(names: Sequence[str], options: argparse.Namespace) -> dict[str, list[list[dict[str, Any]]]]:
    report.introduce("fit")
    with closing_all([]) as worlds:
        for name in names:
            print(f"starting: {CONTENDERS[name].label}", flush=True)
            worlds.append(_start(name, options))
            worlds[-1].pause()
        print(f"{options.rounds} rounds of {options.steps} steps each, load {load():.1f}", flush=True)
        answers = take_turns(worlds, {}, rounds=options.rounds)
        for world, rounds in zip(worlds, answers, strict=True):
            check_trained(world.name, rounds)
    return dict(zip(names, answers, strict=True))


def check_trained(name: str, rounds: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    """Refuses figures of a contender whose ranks drifted apart or whose weights stood still.

    Not to communicate would be the fastest way; Horovod's wrapper on Keras 3 takes it.

    Args:
        name: of the contender.
        rounds: for each round each rank's answer.
    """
    for answers in rounds:
        if len({answer["weights"] for answer in answers}) > 1:
            raise ContenderError(f"{name}: the ranks' weights differ, so its time is not one of training.")
    if len(rounds) > 1 and rounds[0][0]["weights"] == rounds[-1][0]["weights"]:
        raise ContenderError(f"{name}: the weights did not change, so its time is not one of training.")


def _start(name: str, options: argparse.Namespace) -> World:
    contender = CONTENDERS[name]
    settings: dict[str, Any] = {key: getattr(options, key) for key in ("model", "np", "batch", "steps")}
    if options.bucket_bytes and contender.backend:
        settings["optimizer_options"] = {"bucket_bytes": options.bucket_bytes}
    return World(
        name,
        # The one process alone gets the threads of one rank: what communication costs is the difference.
        1 if contender.alone or contender.devices else options.np,
        module="tfdist.bench.fit_ranks",
        options={"contender": name, "backend": contender.backend, **settings},
        variables=(_LEGACY if "tf_keras" in contender.needs else {})
        | {"TFDIST_STRATEGY": contender.strategy.format(np=options.np)}
        | report.thread_share(1 if contender.devices else options.np),
        backend=contender.backend,
        stoppable=contender.stoppable,
        timeout=options.timeout,
    )


def _step_table(milliseconds: Mapping[str, Sequence[float]], cpu: Mapping[str, Sequence[float]]) -> str:
    rows = [
        [
            CONTENDERS[name].label,
            f"{statistics.median(rounds):.1f}",
            f"{min(rounds):.1f}",
            f"{max(rounds):.1f}",
            f"{statistics.median(cpu[name]):.1f}",
        ]
        for name, rounds in milliseconds.items()
    ]
    return table(["ms a step", "median", "least", "most", "CPU of a rank"], rows)


def _parser() -> argparse.ArgumentParser:
    parser = report.parser("fit", "Time of a training step in fit(), against a hand-written loop and peers.")
    parser.add_argument("--model", choices=MODELS, default="mlp", help="default: mlp, 784-1024-1024-10")
    parser.add_argument("-np", "--np", type=report.at_least(2), default=2, metavar="N", help="ranks (2)")
    parser.add_argument(
        "--batch", type=report.at_least(1), default=64, metavar="B", help="batch per rank (64)"
    )
    parser.add_argument(
        "--steps", type=report.at_least(1), default=30, metavar="S", help="steps a round (30)"
    )
    parser.add_argument("--rounds", type=report.at_least(1), default=15, metavar="R", help="rounds (15)")
    parser.add_argument(
        "--bucket-bytes", type=report.at_least(1), metavar="K", help="instead of tfdist's default"
    )
    parser.add_argument(
        "--only", nargs="+", choices=tuple(CONTENDERS), metavar="NAME", help=f"of: {', '.join(CONTENDERS)}"
    )
    return parser
