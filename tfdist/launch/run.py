"""`tfdist run`: several copies of a script as one world, from a command line."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
import pathlib
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NoReturn

from tfdist import resources
from tfdist.cluster import from_environment
from tfdist.errors import LauncherError
from tfdist.launch.output import FileCopy, LiveLines, Screen, WholeLines, write_fully
from tfdist.launch.plan import (
    BACKENDS,
    HandoverPlan,
    LocalPlan,
    Request,
    describe,
    is_local,
    parse_hosts,
    plan_handover,
    plan_local,
    world_size,
)
from tfdist.launch.supervise import Outcome, Wiring, run_local

_USAGE_CODE = 2
_SAY = "tfdist run:"


def main(argv: Sequence[str]) -> int:
    """Runs the command line after `tfdist run`.

    Returns:
        0; the exit code of the rank that failed first (128 + signal if a signal ended it); 128 + signal if
        one interrupted the launcher; 2 for input that cannot be run.
    """
    head, program = split_program(argv)
    options = _parser().parse_args(head)
    try:
        request = Request(
            program=resolve_program(program, module=options.module),
            size=options.np,
            hosts=parse_hosts(options.hosts) if options.hosts else (),
            backend=options.backend,
            strategy=options.strategy,
            timeout=options.timeout,
            verbose=options.verbose,
        )
        refuse_nesting(os.environ)
        if is_local(request, hostname=socket.gethostname()):
            return _run_here(request, output_folder=options.output_dir, dry_run=options.dry_run)
        if options.output_dir:
            raise LauncherError("--output-dir works on one machine; with -H, horovodrun's own options do it.")
        return _hand_over(request, dry_run=options.dry_run)
    except LauncherError as error:
        print(f"{_SAY} error: {error}", file=sys.stderr)
        return _USAGE_CODE


def split_program(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits our options from the program and its arguments, which may look like options of ours.

    Example:
        >>> split_program(["-np", "2", "train.py", "-np", "3"])
        (['-np', '2'], ['train.py', '-np', '3'])
    """
    valued = {name for action in _parser()._actions if action.nargs is None for name in action.option_strings}
    position = 0
    while position < len(argv):
        word = argv[position]
        if word == "--":
            return list(argv[:position]), list(argv[position + 1 :])
        if word == "-m":
            return list(argv[: position + 1]), list(argv[position + 1 :])
        if not word.startswith("-") or word == "-":
            break
        position += 2 if word in valued else 1
    return list(argv[:position]), list(argv[position:])


def resolve_program(program: Sequence[str], *, module: bool) -> tuple[str, ...]:
    """The command line of each rank: Python for modules and .py files, anything executable as it is.

    Raises:
        LauncherError: nothing to run, or it does not exist.
    """
    if not program:
        what = "module" if module else "script"
        raise LauncherError(f"Which {what}? Name it after the options: `tfdist run -np 2 train.py`.")
    name = program[0]
    if module:
        return (sys.executable, "-m", *program)
    path = pathlib.Path(name)
    if path.suffix == ".py" or (path.is_dir() and (path / "__main__.py").is_file()):
        if not path.exists():
            raise LauncherError(f"There is no script {name!r} in {os.getcwd()}.")
        return (sys.executable, *program)
    found = shutil.which(name) or (shutil.which(f"./{name}") if path.is_file() else None)
    if found is None and path.is_file():
        raise LauncherError(f"{name!r} is neither a .py file nor executable. Run `chmod +x {name}`.")
    if found is None:
        raise LauncherError(f"There is no script or program {name!r} in {os.getcwd()} or on the PATH.")
    return (found, *program[1:])


def refuse_nesting(environ: Mapping[str, str]) -> None:
    """A world inside every rank of another world is never what was meant.

    Raises:
        LauncherError: this process is already one of several ranks, or its launcher's variables contradict.
    """
    outer = from_environment(environ)
    if outer.size > 1:
        raise LauncherError(
            f"This process already is rank {outer.rank} of {outer.size}, started by {outer.launcher}, and "
            "each rank would start a world of its own. Start the script itself with that launcher "
            "(tfdist.init() understands it), or start one `tfdist run` outside."
        )


@contextlib.contextmanager
def private_world(
    request: Request, *, program: Callable[[str], tuple[str, ...]] | None = None
) -> Iterator[tuple[LocalPlan, str]]:
    """The plan of a world on this machine, and its private folder, removed afterwards.

    Args:
        request: what the user asked for.
        program: makes the command line from the folder's name, where it depends on that.
    """
    world_size(request)  # refuses before anything is made
    job = f"run-{secrets.token_hex(8)}"
    folder = tempfile.mkdtemp(prefix=f"tfdist-{job}-")
    try:
        if program:
            request = dataclasses.replace(request, program=program(folder))
        secret = secrets.token_hex(32)
        yield (
            plan_local(
                request, os.environ, job=job, secret=secret, folder=folder, cores=resources.usable_cores()
            ),
            folder,
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run_here(request: Request, *, output_folder: str | None, dry_run: bool) -> int:
    with private_world(request) as (plan, folder), contextlib.ExitStack() as files:
        if dry_run:
            print(*describe(plan), sep="\n")
            return 0
        # Both at one place (a terminal, or 2>&1): one screen, so that lines stay whole.
        together = os.path.sameopenfile(1, 2)
        screen = Screen(write_fully(1), is_terminal=os.isatty(1))
        errors = screen if together else Screen(write_fully(2), is_terminal=os.isatty(2))
        if output_folder is not None:
            wire = _wire_files(plan, pathlib.Path(output_folder), files)
            errors.write_line(f"{_SAY} the ranks write to {output_folder}/rank-*.log".encode())
        else:
            wire = _wire_screens(plan, screen, errors)
        try:
            outcome = run_local(plan, wire, environ=os.environ, folder=folder)
        except BrokenPipeError:  # `tfdist run ... | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            return 128 + signal.SIGPIPE
        for line in explain(outcome, plan):
            errors.write_line(line)
        return outcome.code


def explain(outcome: Outcome, plan: LocalPlan) -> list[bytes]:
    """What to say at the end: nothing after success, otherwise who failed and, last, its own words."""
    if outcome.signal:
        return [f"{_SAY} ended by {signal.Signals(outcome.signal).name}; all ranks are ended.".encode()]
    if outcome.failed is None:
        return []
    status = outcome.ends[outcome.failed].status
    how = f"exit code {status}" if status > 0 else _signal_text(-status)
    if len(plan.ranks) == 1:
        return [] if status > 0 else [f"{_SAY} the script was ended by {how}.".encode()]
    words = outcome.memories[outcome.failed].last_words(quiet=plan.quiet)
    prefix = f"[{outcome.failed}] ".encode()
    rest = "; the other ranks were ended" + (". Its last words:" if words else ".")
    return [
        f"{_SAY} rank {outcome.failed} failed first, with {how}{rest}".encode(),
        *(prefix + word for word in words),
    ]


def _signal_text(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = "a signal"
    hint = " (the kernel does that when memory runs out)" if number == signal.SIGKILL else ""
    return f"{name}, signal {number}{hint}"


def _wire_screens(plan: LocalPlan, screen: Screen, errors: Screen) -> Callable[[int], Wiring]:
    alone = len(plan.ranks) == 1

    def wire(rank: int) -> Wiring:
        prefix = b"" if alone else f"[{rank}] ".encode()
        if rank > 0:
            stdout = WholeLines(screen, prefix, quiet=plan.quiet)
            stderr = stdout if errors is screen else WholeLines(errors, prefix, quiet=plan.quiet)
            return Wiring(stdout, stderr)
        live = [
            LiveLines(place, prefix, quiet=plan.quiet, hold_text=not (alone or os.isatty(descriptor)))
            for place, descriptor in ((screen, 1), (errors, 2))
        ]
        if errors is screen:
            live[1] = live[0]
        terminals = [descriptor if os.isatty(descriptor) else None for descriptor in (1, 2)]
        return Wiring(live[0], live[1], terminals[0], terminals[1], stdin=True)

    return wire


def _wire_files(
    plan: LocalPlan, folder: pathlib.Path, files: contextlib.ExitStack
) -> Callable[[int], Wiring]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LauncherError(f"--output-dir {str(folder)!r} cannot be made: {error.strerror}.") from None
    digits = len(str(len(plan.ranks) - 1))

    def wire(rank: int) -> Wiring:
        file = files.enter_context((folder / f"rank-{rank:0{digits}}.log").open("wb"))
        channel = FileCopy(file, quiet=plan.quiet)
        return Wiring(channel, channel, stdin=rank == 0)

    return wire


def _hand_over(request: Request, *, dry_run: bool) -> int:
    """Becomes the other launcher, so that signals and exit code are its own; returns for a dry run only."""
    here = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    horovodrun, mpirun = (shutil.which(name, path=here) for name in ("horovodrun", "mpirun"))
    if mpirun and not _is_open_mpi(mpirun):
        mpirun = None  # another MPI's, whose options differ
    plan = plan_handover(request, os.environ, horovodrun=horovodrun, mpirun=mpirun)
    if not dry_run:
        _become(plan)
    print(*describe(plan), sep="\n")
    return 0


def _is_open_mpi(mpirun: str) -> bool:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=30).stdout
        return "Open MPI" in version or "OpenRTE" in version
    return False


def _become(plan: HandoverPlan) -> NoReturn:
    print(f"{_SAY} {shlex.join(plan.argv)}", file=sys.stderr, flush=True)
    os.execve(plan.argv[0], list(plan.argv), {**os.environ, **plan.variables})


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(_USAGE_CODE, f"{_SAY} error: {message}\n")


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise ValueError(text)
    return value


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="tfdist run",
        usage="tfdist run -np N [options] (script.py | -m module | program) [arguments ...]",
        description="Runs N copies of a script as one world.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-np", "--np", "-n", type=int, metavar="N", help="number of processes; default: all slots of -H")
    add(
        "-H",
        "--hosts",
        metavar="HOST:SLOTS,...",
        help="where to run; other hosts are left to horovodrun or mpirun",
    )
    add("--backend", choices=BACKENDS, help="engine of tfdist.init(); default: the script's choice")
    add(
        "--strategy",
        metavar="NAME",
        help="ring, (async_)parameter_server(servers=k) or auto; default: the script's choice",
    )
    add("--timeout", type=_seconds, metavar="S", help="bound of every wait for another rank, in seconds")
    add("--output-dir", metavar="DIR", help="writes DIR/rank-N.log instead of to the screen")
    add("--verbose", action="store_true", help="shows TensorFlow's start-up messages")
    add("--dry-run", action="store_true", help="prints what would be started, and starts nothing")
    add("-m", dest="module", action="store_true", help="runs a module, like python -m")
    return parser
