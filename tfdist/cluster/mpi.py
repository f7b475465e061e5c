"""MPI launchers: Open MPI, and MPICH with its relatives, which speak PMI."""

from __future__ import annotations

import os
from collections.abc import Mapping

from tfdist.cluster.slurm import in_slurm_step, slurm_job
from tfdist.cluster.spec import ClusterSpec, placed
from tfdist.cluster.variables import integers, show
from tfdist.errors import LauncherError


def read_openmpi(environ: Mapping[str, str]) -> ClusterSpec | None:
    names = [f"OMPI_COMM_WORLD_{part}" for part in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
    values = integers(environ, names, by="Open MPI's mpirun")
    if values is None:
        return None
    # Version 5 sets PMIX_NAMESPACE; version 4 that and the others, older ones only the last.
    sources = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_hnp_uri")
    job = next((f"openmpi-{environ[name]}" for name in sources if environ.get(name)), "")
    return placed("openmpi", values, None, job, show(environ, names))


def read_mpich(environ: Mapping[str, str]) -> ClusterSpec | None:
    world = integers(environ, ["PMI_RANK", "PMI_SIZE"], by="MPICH's mpiexec")
    names = ["MPI_LOCALRANKID", "MPI_LOCALNRANKS"]
    local = integers(environ, names, by="MPICH's mpiexec") if world else None
    if local is None and world:
        names = ["PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"]  # Cray's launcher
        local = integers(environ, names, by="the PMI launcher")
    if world is None:
        return None
    shown = show(environ, ["PMI_RANK", "PMI_SIZE", *names])
    if local is None:
        if world[1] > 1 and not in_slurm_step(environ):
            raise LauncherError(
                f"{shown}, but neither MPI_LOCALRANKID and MPI_LOCALNRANKS nor PMI_LOCAL_RANK and "
                "PMI_LOCAL_SIZE are set, so the place of this process on its host is unknown. Export them."
            )
        local = [0, 1]
    return placed("mpich", world + local, None, _mpich_job(environ, one_host=local[1] == world[1]), shown)


def is_hydra(environ: Mapping[str, str]) -> bool:
    return "MPI_LOCALRANKID" in environ and "PMI_RANK" in environ


def _mpich_job(environ: Mapping[str, str], *, one_host: bool) -> str:
    for name in ("PMI_JOBID", "PALS_APID"):
        if environ.get(name):
            return f"mpich-{environ[name]}"
    # Hydra names the job only to programs that speak PMI. On one host its proxy is every rank's ancestor.
    proxy = _hydra_proxy() if one_host and is_hydra(environ) else None
    if proxy:
        return f"mpich-{proxy}"
    # In an allocation on several hosts Hydra starts its proxies by one Slurm step per job.
    return f"mpich-{slurm_job(environ)}" if is_hydra(environ) and in_slurm_step(environ) else ""


def _hydra_proxy() -> int | None:
    """Process id of the Hydra proxy above this process, through wrapper scripts if there are any."""
    process = os.getpid()
    while process > 1:
        try:
            with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
                name, _, rest = file.read().partition("(")[2].rpartition(")")
        except OSError:
            return None
        if name.startswith("hydra_pmi_proxy"[:15]):
            return process
        process = int(rest.split()[1])
    return None
