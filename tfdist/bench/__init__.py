"""`tfdist bench`: measures training and collectives as ratios within one run.

Problem: times of two runs can't be compared on a machine that does other work too, and hardly any machine
does nothing else. Ratios can, if the contenders take turns.

Solution: every contender is a world of fresh processes, all are started before anything is timed, and they
take turns in short rounds (A B C, C B A, ...), each one stopped while another runs. A ratio is the median of
the rounds' ratios.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

# Name -> (module with `main(argv) -> int`, what it measures).
_SUBJECTS = {
    "fit": ("tfdist.bench.fit", "time of a training step, beside the same by hand and beside peers"),
    "allreduce": ("tfdist.bench.allreduce", "bus bandwidth by size, beside TCP and memory copies"),
    "comm": ("tfdist.bench.comm", "bytes and time of an update by strategy, beside the models on paper"),
    "asynchronous": (
        "tfdist.bench.asynchronous",
        "asynchronous servers with a slow worker, beside ring and loop",
    ),
    "latency": ("tfdist.bench.latency", "time of a tiny all-reduce, eager and inside tf.function"),
    "memory": ("tfdist.bench.memory", "peak memory and step time of recomputation and slices"),
    "start": ("tfdist.bench.start", "what importing tfdist and its launcher add"),
}


def main(argv: Sequence[str]) -> int:
    """Command line of `tfdist bench`.

    Args:
        argv: words after `tfdist bench`.

    Returns:
        0 when everything that could be measured was, 1 when nothing could, 2 for a command line that cannot
        be understood. Missed targets are reported, not failures.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print(_help())
        return 0 if argv else 2
    subject, *rest = argv
    if subject not in _SUBJECTS:
        print(f"tfdist bench: error: there is no subject {subject!r}.\n\n{_help()}", file=sys.stderr)
        return 2
    return int(importlib.import_module(_SUBJECTS[subject][0]).main(rest))


def _help() -> str:
    lines = [f"  {name:<14}{what}" for name, (_, what) in _SUBJECTS.items()]
    return "\n".join(
        [
            "usage: tfdist bench SUBJECT [options]",
            "",
            *lines,
            "",
            "`tfdist bench SUBJECT --help` lists its options; all take --json FILE for the raw figures.",
        ]
    )
