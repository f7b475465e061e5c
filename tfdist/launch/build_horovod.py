"""`tfdist build-horovod`: Horovod for the TensorFlow that is installed, in one command.

Problem: `pip install horovod` fails on every TensorFlow since 2.14, and a Horovod that was built for another
TensorFlow, or without MPI, fails later and obscurely.

Solution: find out what is wanted and what is missing before the long compile (`horovod_toolchain`); build
from PyPI's checked source (`horovod_compile`) into a cache keyed by everything the result depends on
(`horovod_wheels`); believe it only after a real all-reduce between two processes (`horovod_proof`), and
install it then, so that a wheel that fails never replaces one that works. A Horovod that is already there
and passes that proof is kept.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from tfdist import resources
from tfdist.collectives.horovod_probe import installed_horovod
from tfdist.errors import BackendUnavailableError
from tfdist.launch import horovod_compile, horovod_proof, horovod_toolchain
from tfdist.launch.horovod_install import (
    install_runtime_packages,
    install_wheel,
    lacking_runtime_packages,
    reason_to_replace,
)
from tfdist.launch.horovod_plan import (
    BuildPlan,
    cuda_tensorflow_missing,
    describe_missing,
    describe_tensorflow,
    ingredients,
    plan_build,
)
from tfdist.launch.horovod_toolchain import FEATURES, Machine, Missing
from tfdist.launch.horovod_wheels import WheelCache, default_cache

_BUILD_BYTES = 1_500_000_000

Tell = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class BuildResult:
    """What `build_horovod` did.

    Attributes:
        features: what was asked for, sorted.
        wheel: the wheel in the cache; None when an installed Horovod was kept.
        how: `kept`, `cached` or `built`.
        proofs: all-reduces that passed; empty with `install=False`.
        seconds: time it took.
    """

    features: tuple[str, ...]
    wheel: Path | None
    how: str
    proofs: tuple[horovod_proof.Proof, ...]
    seconds: float


def build_horovod(
    features: Sequence[str] | None = None,
    *,
    cache: Path | None = None,
    install: bool = True,
    rebuild: bool = False,
    jobs: int | None = None,
    capabilities: Sequence[int] | None = None,
    timeout: float = 3600.0,
    verbose: bool = False,
    tell: Tell = print,
) -> BuildResult:
    """Makes a Horovod that works with the installed TensorFlow, and proves that it does.

    Args:
        features: of `gloo`, `mpi`, `nccl`; Gloo is always built in. By default Gloo, and MPI where a working
            `mpicxx` is found (a Horovod without MPI, started by mpirun, would take every rank for a world of
            its own).
        cache: folder for source, tools and wheels; `$XDG_CACHE_HOME/tfdist`, or `~/.cache/tfdist`.
        install: installs the wheel into this Python's environment, once it is proved.
        rebuild: compiles even if an installed Horovod or a cached wheel would do.
        jobs: compilers at once; by default as many as cores and memory allow.
        capabilities: CUDA device generations such as `(80, 90)`; by default all that the toolkit knows.
        timeout: bound in seconds for the compile, and for waiting for another build in the same cache.
        verbose: passes the compilers' output on.
        tell: receives progress, line by line.

    Returns:
        What was done.

    Raises:
        BackendUnavailableError: something is missing (all of it is named, with the commands that bring it),
            the compile failed (with its first error), or the proof did.

    Example:
        >>> result = build_horovod(["gloo"], tell=lambda line: None)  # doctest: +SKIP
        >>> result.how in ("kept", "cached", "built")  # doctest: +SKIP
        True
    """
    start = time.monotonic()
    machine = Machine()
    wheels = WheelCache(cache or default_cache())
    plan = plan_build(machine, features, capabilities=capabilities, tell=tell)

    def done(how: str, wheel: Path | None, proofs: tuple[horovod_proof.Proof, ...]) -> BuildResult:
        return BuildResult(plan.features, wheel, how, proofs, time.monotonic() - start)

    if install and not rebuild:
        proofs = _prove_installed(plan, tell=tell)
        if proofs:
            return done("kept", None, proofs)
    key = ingredients(plan).key()
    wheel = None if rebuild else wheels.find(key)
    how = "cached"
    if wheel is None:
        wheel, how = _build_locked(
            plan,
            machine,
            wheels,
            key,
            jobs=jobs,
            rebuild=rebuild,
            timeout=timeout,
            verbose=verbose,
            tell=tell,
        )
    tell(f"{how} wheel: {wheel}")
    if install:
        install_runtime_packages(tell=tell)
    elif lacking_runtime_packages():
        tell(f"not proved: Horovod imports {', '.join(lacking_runtime_packages())}, which are not installed")
        return done(how, wheel, ())
    # Proved before it replaces a Horovod that may work.
    with tempfile.TemporaryDirectory(prefix="tfdist-horovod-") as folder:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        proofs = _prove(plan, package_path=Path(folder), tell=tell)
    if install:
        install_wheel(wheel, plan.features, tell=tell)
    return done(how, wheel, proofs)


def _build_locked(
    plan: BuildPlan,
    machine: Machine,
    wheels: WheelCache,
    key: str,
    *,
    jobs: int | None,
    rebuild: bool,
    timeout: float,
    verbose: bool,
    tell: Tell,
) -> tuple[Path, str]:
    """Builds the wheel, unless another builder finished it while this one waited for the lock."""
    compiler = horovod_toolchain.find_compiler(machine)
    if isinstance(compiler, Missing):
        raise BackendUnavailableError(describe_missing([compiler]))
    with wheels.lock(timeout=timeout, tell=tell):
        ready = None if rebuild else wheels.find(key)
        if ready is not None:
            return ready, "cached"
        _check_disk(wheels.root)
        about = describe_tensorflow()
        if "nccl" in plan.features and not about["cuda"]:
            raise BackendUnavailableError(describe_missing([cuda_tensorflow_missing(str(about["version"]))]))
        if "nccl" not in plan.features and about["cuda"]:
            tell("note: this TensorFlow supports GPUs; for all-reduce between GPUs add --with gloo,nccl")
        tools = horovod_compile.prepare_tools(wheels, machine, tell=tell)
        archive = horovod_compile.fetch_source(wheels, tools, tell=tell)
        folder = wheels.fresh_build_folder(key)
        try:
            source = horovod_compile.unpack_source(archive, folder)
            workers = jobs or horovod_toolchain.parallel_jobs(
                cores=resources.usable_cores(), memory=resources.free_memory() or 4 * 10**9
            )
            environment = horovod_compile.build_environment(
                os.environ,
                tools=tools,
                compiler=compiler,
                jobs=workers,
                mpi=plan.mpi,
                nccl=plan.nccl,
                nccl_home=horovod_compile.link_nccl(plan.nccl, folder / "nccl") if plan.nccl else None,
                cuda=plan.cuda,
                capabilities=plan.capabilities,
            )
            log = wheels.logs / f"{key}.log"
            tell(
                f"compiling Horovod {horovod_compile.HOROVOD_VERSION} ({', '.join(plan.features)}) for "
                f"TensorFlow {about['version']} with {compiler}, {workers} at once; some minutes, log: {log}"
            )
            built = horovod_compile.compile_wheel(
                source,
                folder / "wheel",
                environment=environment,
                log=log,
                timeout=timeout,
                tell=tell,
                verbose=verbose,
            )
            return wheels.store(key, built), "built"
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _check_disk(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < _BUILD_BYTES:
        raise BackendUnavailableError(
            f"The build needs {_BUILD_BYTES / 1e9:.1f} GB of disk in {folder}, free are {free / 1e9:.1f} GB. "
            "Free some, or choose another folder with --cache."
        )


def _prove_installed(plan: BuildPlan, *, tell: Tell) -> tuple[horovod_proof.Proof, ...]:
    """Proofs of the Horovod that is installed if it fits the plan; empty if it doesn't, or doesn't work."""
    installed = installed_horovod()
    if installed is None:
        return ()
    reason = reason_to_replace(installed, plan.features)
    if reason:
        tell(reason)
        return ()
    tell(
        f"Horovod {installed.version} for TensorFlow {installed.tensorflow} with "
        f"{', '.join(sorted(installed.features))} is installed; proving it"
    )
    try:
        install_runtime_packages(tell=tell)
        return _prove(plan, package_path=None, tell=tell)
    except BackendUnavailableError as error:
        lines = str(error).splitlines()
        tell(f"the installed Horovod doesn't work and is replaced: {lines[0]}")
        tell(f"    {lines[-1].strip()[:300]}")
        return ()


def _prove(plan: BuildPlan, *, package_path: Path | None, tell: Tell) -> tuple[horovod_proof.Proof, ...]:
    """All-reduces between two processes, with each controller that was built."""
    proofs = [horovod_proof.prove_gloo(package_path=package_path)]
    if plan.mpi:
        mpirun = horovod_proof.find_mpirun(plan.mpi.mpicxx)
        if mpirun:
            proofs.append(horovod_proof.prove_mpi(mpirun, package_path=package_path))
        else:
            tell("MPI is built in but was not run: no mpirun on PATH")
    for proof in proofs:
        tell(
            f"proved: 2 processes all-reduce over {proof.controller} on {proof.device}, 16 MiB in "
            f"{proof.seconds * 1e3:.0f} ms, {proof.bandwidth / 1e9:.2f} GB/s; "
            f"built with {', '.join(proof.built)}"
        )
    if "nccl" in plan.features and all(proof.device == "CPU" for proof in proofs):
        tell("NCCL is compiled and linked but was not run: that needs 2 GPUs")
    return tuple(proofs)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tfdist build-horovod",
        description=f"Builds Horovod {horovod_compile.HOROVOD_VERSION} for the TensorFlow that is installed, "
        "proves it by an all-reduce between two processes, and installs it. Wheels are cached.",
    )
    parser.add_argument(
        "--with",
        dest="features",
        metavar="LIST",
        help="comma-separated: gloo, mpi, nccl. Gloo is always in; by default MPI too where mpicxx is found",
    )
    parser.add_argument("--cache", type=Path, metavar="DIR", help=f"default: {default_cache()}")
    parser.add_argument("--no-install", action="store_true", help="only build the wheel and print its path")
    parser.add_argument("--rebuild", action="store_true", help="compile even if installed or cached")
    parser.add_argument(
        "--jobs", type=_positive, metavar="N", help="compilers at once (default: by cores, memory)"
    )
    parser.add_argument(
        "--cuda-cc",
        metavar="LIST",
        help="CUDA device generations, such as 80,90 (default: all of the toolkit)",
    )
    parser.add_argument("--timeout", type=_positive, default=3600, metavar="S", help="bound for the compile")
    parser.add_argument("--verbose", action="store_true", help="show the compilers' output")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"needs a number of at least 1, received {text}")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of `tfdist build-horovod`; returns 0 when a proven Horovod is there, else 1."""
    parser = _parser()
    options = parser.parse_args(argv)
    features = None
    if options.features is not None:
        features = [name.strip().lower() for name in options.features.split(",") if name.strip()]
        if not features or set(features) - set(FEATURES):
            parser.error(f"--with takes a list of {', '.join(FEATURES)}; received {options.features!r}")
    capabilities = None
    if options.cuda_cc is not None:
        if not re.fullmatch(r"\d+(,\d+)*", options.cuda_cc):
            parser.error(f"--cuda-cc takes numbers such as 80,90; received {options.cuda_cc!r}")
        capabilities = [int(number) for number in options.cuda_cc.split(",")]
    # Ends the compilers too, through the build's `finally`, when this process is asked to end.
    previous = signal.signal(signal.SIGTERM, _end)
    try:
        result = build_horovod(
            features,
            cache=options.cache.absolute() if options.cache else None,
            install=not options.no_install,
            rebuild=options.rebuild,
            jobs=options.jobs,
            capabilities=capabilities,
            timeout=options.timeout,
            verbose=options.verbose,
            tell=lambda line: print(line, flush=True),
        )
    except BackendUnavailableError as error:
        print(f"tfdist build-horovod: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("tfdist build-horovod: interrupted; the cache is unharmed", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, previous)
    state = "wheel ready" if options.no_install else "Horovod is ready"
    print(f"{state}: {result.how}, {', '.join(result.features)}, {result.seconds:.0f} s", flush=True)
    return 0


def _end(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
