"""`tfdist.run`: a function on several ranks, from a notebook or script, and what each rank returned.

The function travels by value (cloudpickle), so that lambdas and functions typed into a notebook work. Call
and results are files in the run's private folder: nothing is unpickled that another user could have sent.
"""

from __future__ import annotations

import codecs
import json
import os
import pathlib
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO, TypeVar

from tfdist.errors import LauncherError, PeerLostError
from tfdist.launch.output import LiveLines, Screen, WholeLines
from tfdist.launch.plan import BACKENDS, LocalPlan, Request
from tfdist.launch.run import private_world, refuse_nesting
from tfdist.launch.supervise import Outcome, Wiring, run_local

_T = TypeVar("_T")


class RemoteTraceback(Exception):
    """Cause of an exception re-raised by `tfdist.run`: the traceback of the rank that raised it."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(f"on rank {rank}:\n\n{text}")
        self.rank = rank


def run(
    func: Callable[..., _T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    np: int = 2,
    *,
    backend: str = "auto",
    strategy: str | None = None,
    timeout: float = 300,
    verbose: bool = False,
) -> list[_T]:
    """Runs `func(*args, **kwargs)` on `np` new processes of this machine and returns all results.

    Each process has called `tfdist.init()` before and calls `tfdist.shutdown()` afterwards. What the ranks
    print appears here, prefixed by their rank. Interrupting the call ends all of them.

    Args:
        func: anything cloudpickle can send: functions, lambdas, closures, bound methods.
        args: positional arguments, equal for all ranks.
        kwargs: keyword arguments, equal for all ranks.
        np: number of processes.
        backend: `auto`, `tf` or `horovod`.
        strategy: name of the strategy; None for the default.
        timeout: bound of every wait of one rank for another, in seconds. The run itself has no bound.
        verbose: shows TensorFlow's start-up messages.

    Returns:
        The results in rank order.

    Raises:
        LauncherError: impossible arguments, or this process already is one of several ranks.
        PeerLostError: a rank ended without returning, for example killed by a signal.
        Exception: what the first failing rank raised; its `__cause__` holds that rank's traceback.

    Example:
        >>> import tfdist
        >>> tfdist.run(lambda x: x + tfdist.rank(), (10,), np=2)  # doctest: +SKIP
        [10, 11]

    Reference:
        `horovod.run`, whose first four arguments these are.
    """
    if backend not in BACKENDS:
        raise LauncherError(f"backend must be one of {', '.join(BACKENDS)}. Received {backend!r}.")
    refuse_nesting(os.environ)
    request = Request(
        program=(),
        size=np,
        backend=None if backend == "auto" else backend,
        strategy=strategy,
        timeout=timeout,
        verbose=verbose,
    )
    worker = str(pathlib.Path(__file__).with_name("worker.py"))
    with private_world(request, program=lambda folder: (sys.executable, worker, folder)) as (plan, name):
        folder = pathlib.Path(name)
        _send_call(folder, func, tuple(args), dict(kwargs or {}))
        outcome = run_local(plan, _wire(plan), environ=os.environ, folder=name, take_signals=False)
        return _collect(folder, outcome, len(plan.ranks))


def _send_call(folder: pathlib.Path, func: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    import cloudpickle

    # The ranks must find the modules that the function imports, wherever this process found them.
    (folder / "path.json").write_text(json.dumps([os.path.abspath(entry) for entry in sys.path]))
    (folder / "call.pickle").write_bytes(cloudpickle.dumps((func, args, kwargs)))


def _wire(plan: LocalPlan) -> Callable[[int], Wiring]:
    # Through sys.stdout, not descriptor 1: in a notebook only that reaches the page.
    screen, errors = (
        Screen(_writer(sys.stdout), is_terminal=False),
        Screen(_writer(sys.stderr), is_terminal=False),
    )

    def wire(rank: int) -> Wiring:
        prefix = f"[{rank}] ".encode()
        if rank == 0:
            out, err = (LiveLines(s, prefix, quiet=plan.quiet, hold_text=True) for s in (screen, errors))
            return Wiring(out, err)
        lines = [WholeLines(s, prefix, quiet=plan.quiet) for s in (screen, errors)]
        return Wiring(lines[0], lines[1])

    return wire


def _writer(stream: TextIO) -> Callable[[bytes], None]:
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def write(data: bytes) -> None:
        stream.write(decoder.decode(data))
        stream.flush()

    return write


def _collect(folder: pathlib.Path, outcome: Outcome, size: int) -> list[Any]:
    answers: dict[int, tuple[str, Any, str]] = {}
    for rank in range(size):
        file = folder / f"answer-{rank}.pickle"
        if file.exists():
            answers[rank] = pickle.loads(file.read_bytes())
    raised = [rank for rank, answer in answers.items() if answer[0] == "raised"]
    if outcome.failed is not None or raised:
        first = raised[0] if outcome.failed is None else outcome.failed
        if first not in raised:
            raise PeerLostError(_ended_text(first, outcome.ends[first].status))
        _, error, text = answers[first]
        raise error from RemoteTraceback(first, text)
    silent = [rank for rank in range(size) if rank not in answers]
    if silent:
        raise PeerLostError(_ended_text(silent[0], 0))
    return [answers[rank][1] for rank in range(size)]


def _ended_text(rank: int, status: int) -> str:
    how = f"by signal {-status}" if status < 0 else f"with exit code {status}"
    return (
        f"Every rank must return from the function given to tfdist.run, but the process of rank {rank} ended "
        f"{how} before it did. Its output may say more; os._exit() and running out of memory look like this."
    )
