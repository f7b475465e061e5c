"""Who and where am I: the launcher's environment, read once into a `ClusterSpec`.

A script must not care who started it. Each launcher says rank and size in variables of its own, and each has
traps: Open MPI and MPICH may start their daemons through `srun`, so that ranks inherit the daemon's Slurm
variables; a Slurm allocation sets variables for programs that are not parallel at all; TF_CONFIG is set on
single machines too. A wrong guess is a job that trains N times alone, or hangs. So the rules are strict:

1. The first of these that is present decides: tfdist's own launcher (TFDIST_RANK …), horovodrun
   (HOROVOD_RANK …), Open MPI (OMPI_COMM_WORLD_RANK …), MPICH and other PMI launchers (PMI_RANK …), TF_CONFIG,
   Slurm (only inside a job step started by `srun`). None: size 1.
2. Any two that are present must agree on rank and size, with two exceptions: a TF_CONFIG or Slurm step of one
   task says nothing, and Slurm is not asked when tfdist, horovodrun, Open MPI or Hydra started the process,
   since it then describes how their daemons were started.
3. Half-set, malformed and impossible values raise `LauncherError`; nothing is repaired by guessing.

TFDIST_JOB and TFDIST_RENDEZVOUS override `job` and `rendezvous` under every launcher.

The only things read beside `environ` are the user id; for a job on several hosts without TFDIST_RENDEZVOUS
the working directory; and under Hydra, which gives a job no name, the process id of its proxy.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
from collections.abc import Mapping, Sequence

from tfdist.cluster.mpi import is_hydra, read_mpich, read_openmpi
from tfdist.cluster.own import read_horovodrun, read_tfdist
from tfdist.cluster.slurm import read_slurm
from tfdist.cluster.spec import ClusterSpec
from tfdist.cluster.tf_config import read_tf_config
from tfdist.cluster.variables import show
from tfdist.errors import LauncherError

__all__ = ["ClusterSpec", "from_environment", "with_hosts"]

# In order of precedence; each returns None when its launcher is absent.
_READERS = (read_tfdist, read_horovodrun, read_openmpi, read_mpich, read_tf_config, read_slurm)

_SIGNS = {
    "tfdist": ["TFDIST_RANK", "TFDIST_SIZE"],
    "horovodrun": ["HOROVOD_RANK", "HOROVOD_SIZE"],
    "openmpi": ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"],
    "mpich": ["PMI_RANK", "PMI_SIZE"],
    "tf_config": ["TF_CONFIG"],
    "slurm": ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS"],
}


def from_environment(environ: Mapping[str, str]) -> ClusterSpec:
    """Reads the launcher's variables.

    Args:
        environ: the process's environment, normally `os.environ`.

    Returns:
        The place of this process; size 1 when no launcher is seen.

    Raises:
        LauncherError: variables are missing, malformed, impossible, or two launchers disagree.

    Example:
        >>> from_environment({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2",
        ...     "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}).rank
        1
    """
    seen = [spec for read in _READERS if (spec := read(environ)) is not None]
    if any(spec.launcher in ("tfdist", "horovodrun", "openmpi") for spec in seen) or is_hydra(environ):
        seen = [spec for spec in seen if spec.launcher != "slurm"]
    ambient = [spec for spec in seen if spec.launcher in ("slurm", "tf_config") and spec.size == 1]
    telling = [spec for spec in seen if spec not in ambient] or ambient
    if not telling:
        return ClusterSpec()
    chosen = telling[0]
    for other in telling[1:]:
        if (other.rank, other.size) != (chosen.rank, chosen.size):
            raise LauncherError(
                f"Two launchers disagree about this process: {chosen.launcher} says rank {chosen.rank} of "
                f"{chosen.size} ({show(environ, _SIGNS[chosen.launcher])}), {other.launcher} says rank "
                f"{other.rank} of {other.size} ({show(environ, _SIGNS[other.launcher])}). Start the script "
                "with one launcher only, or unset the variables of the one that is not in charge."
            )
        if chosen.launcher == "mpich" and other.launcher == "slurm":
            chosen = other  # `srun --mpi=pmi2` sets PMI_RANK too, but only Slurm knows the hosts and the job
    return _with_meeting_point(chosen, environ)


def with_hosts(spec: ClusterSpec, hosts: Sequence[str]) -> ClusterSpec:
    """Corrects the host's number once all ranks have told where they are.

    Args:
        spec: from a launcher that does not number hosts (Open MPI, MPICH); others come back unchanged.
        hosts: name of each rank's host, in rank order.

    Returns:
        The spec with `cross_rank` in order of the hosts' lowest ranks; unchanged where the names contradict
        the launcher's count of ranks on this host (containers may share a name).

    Example:
        >>> spec = ClusterSpec(rank=2, size=3, cross_rank=2, cross_size=3, launcher="openmpi")
        >>> with_hosts(spec, ["a", "a", "b"]).cross_rank
        1
    """
    here = hosts[spec.rank]
    if spec.launcher not in ("openmpi", "mpich") or list(hosts).count(here) != spec.local_size:
        return spec
    names = list(dict.fromkeys(hosts))
    return dataclasses.replace(spec, cross_rank=names.index(here), cross_size=len(names))


def _with_meeting_point(spec: ClusterSpec, environ: Mapping[str, str]) -> ClusterSpec:
    job = environ.get("TFDIST_JOB") or spec.job
    rendezvous = environ.get("TFDIST_RENDEZVOUS", "")
    if rendezvous and not re.fullmatch(r"file:///.+|tcp://.+:\d+", rendezvous):
        raise LauncherError(
            f"TFDIST_RENDEZVOUS must read like file:///path or tcp://host:port. Received {rendezvous!r}."
        )
    if spec.size == 1:
        return dataclasses.replace(spec, job=job)
    if not job and not rendezvous:
        raise LauncherError(
            f"{spec.launcher} gives this run no name of its own, so ranks cannot tell it from another run. "
            "Export TFDIST_JOB with a value that is equal on all ranks and used by no other run, for example "
            "`TFDIST_JOB=run-$$ mpiexec -n 4 python train.py`."
        )
    job = job or f"{spec.launcher}-{hashlib.sha256(rendezvous.encode()).hexdigest()[:16]}"
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", job)
    if rendezvous:
        pass
    elif spec.addresses:
        rendezvous = f"tcp://{spec.addresses[0]}"
    elif spec.cross_size == 1:
        folder = os.path.join(environ.get("TMPDIR") or "/tmp", f"tfdist-{os.getuid()}-{name}")
        rendezvous = f"file://{os.path.abspath(folder)}/rendezvous"
    else:
        rendezvous = f"file://{os.getcwd()}/.tfdist-{name}.rendezvous"
    return dataclasses.replace(spec, job=job, rendezvous=rendezvous)
