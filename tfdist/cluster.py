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
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.errors import LauncherError


@dataclasses.dataclass(frozen=True)
class ClusterSpec:
    """Place of this process in its world.

    Attributes:
        rank: number of this process in the world, 0-based.
        size: number of processes in the world.
        local_rank: number of this process among those of its host.
        local_size: number of processes of the world on this host.
        cross_rank: number of this host among the hosts.
        cross_size: number of hosts.
        launcher: `tfdist`, `horovodrun`, `openmpi`, `mpich`, `slurm`, `tf_config` or `none`.
        job: identity of this run, equal on all its ranks and different from every other run's.
        rendezvous: where ranks find each other: `file:///path` or `tcp://host:port`; empty at size 1.
        addresses: `host:port` per rank where the launcher fixes them (TF_CONFIG), otherwise empty.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    cross_rank: int = 0
    cross_size: int = 1
    launcher: str = "none"
    job: str = ""
    rendezvous: str = ""
    addresses: tuple[str, ...] = ()


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
    if any(spec.launcher in ("tfdist", "horovodrun", "openmpi") for spec in seen) or _is_hydra(environ):
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
                f"{chosen.size} ({_show(environ, _SIGNS[chosen.launcher])}), {other.launcher} says rank "
                f"{other.rank} of {other.size} ({_show(environ, _SIGNS[other.launcher])}). Start the script "
                "with one launcher only, or unset the variables of the one that is not in charge."
            )
        if chosen.launcher == "mpich" and other.launcher == "slurm":
            chosen = other  # `srun --mpi=pmi2` sets PMI_RANK too, but only Slurm knows the hosts and the job
    return _with_meeting_point(chosen, environ)


# One reader per launcher, in order of precedence; None means that this launcher is absent.


def _read_tfdist(environ: Mapping[str, str]) -> ClusterSpec | None:
    names = ["TFDIST_RANK", "TFDIST_SIZE", "TFDIST_LOCAL_RANK", "TFDIST_LOCAL_SIZE"]
    values = _integers(environ, names, by="tfdist run")
    cross = _integers(environ, ["TFDIST_CROSS_RANK", "TFDIST_CROSS_SIZE"], by="tfdist run")
    if values is None:
        return None
    if values[1] > 1 and not (environ.get("TFDIST_JOB") or environ.get("TFDIST_RENDEZVOUS")):
        raise LauncherError(
            f"TFDIST_SIZE={values[1]} needs TFDIST_JOB (a name that only this run has) or TFDIST_RENDEZVOUS "
            "(file:///path or tcp://host:port), so that ranks find each other. `tfdist run` sets them."
        )
    return _placed("tfdist", values, cross, "", _show(environ, names))


def _read_horovodrun(environ: Mapping[str, str]) -> ClusterSpec | None:
    names = ["HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"]
    values = _integers(environ, names, by="horovodrun")
    cross = _integers(environ, ["HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE"], by="horovodrun")
    if values is None:
        return None
    if environ.get("HOROVOD_ELASTIC") == "1":
        raise LauncherError(
            "HOROVOD_ELASTIC=1: tfdist does not support elastic jobs, where ranks come and go. Start "
            "horovodrun with -np N only, without --min-np, --max-np and --host-discovery-script."
        )
    port = environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT", "")
    job = f"horovodrun-{environ.get('HOROVOD_GLOO_RENDEZVOUS_ADDR', '')}-{port}" if port else ""
    return _placed("horovodrun", values, cross, job, _show(environ, names))


def _read_openmpi(environ: Mapping[str, str]) -> ClusterSpec | None:
    names = [f"OMPI_COMM_WORLD_{part}" for part in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
    values = _integers(environ, names, by="Open MPI's mpirun")
    if values is None:
        return None
    # Version 5 sets PMIX_NAMESPACE; version 4 that and the others, older ones only the last.
    sources = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_hnp_uri")
    job = next((f"openmpi-{environ[name]}" for name in sources if environ.get(name)), "")
    return _placed("openmpi", values, None, job, _show(environ, names))


def _read_mpich(environ: Mapping[str, str]) -> ClusterSpec | None:
    world = _integers(environ, ["PMI_RANK", "PMI_SIZE"], by="MPICH's mpiexec")
    names = ["MPI_LOCALRANKID", "MPI_LOCALNRANKS"]
    local = _integers(environ, names, by="MPICH's mpiexec") if world else None
    if local is None and world:
        names = ["PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"]  # Cray's launcher
        local = _integers(environ, names, by="the PMI launcher")
    if world is None:
        return None
    shown = _show(environ, ["PMI_RANK", "PMI_SIZE", *names])
    if local is None:
        if world[1] > 1 and not _in_slurm_step(environ):
            raise LauncherError(
                f"{shown}, but neither MPI_LOCALRANKID and MPI_LOCALNRANKS nor PMI_LOCAL_RANK and "
                "PMI_LOCAL_SIZE are set, so the place of this process on its host is unknown. Export them."
            )
        local = [0, 1]
    return _placed("mpich", world + local, None, _mpich_job(environ, one_host=local[1] == world[1]), shown)


def _read_tf_config(environ: Mapping[str, str]) -> ClusterSpec | None:
    text = environ.get("TF_CONFIG", "").strip()
    if not text:
        return None
    try:
        config = json.loads(text)
    except ValueError as error:
        raise LauncherError(f"TF_CONFIG is not valid JSON ({error}): {text!r}") from None
    cluster, task = _cluster_and_task(config, text)
    if not cluster:
        return ClusterSpec(launcher="tf_config")
    roles = {*cluster, str(task.get("type", "worker"))} - {"chief", "master", "worker"}
    if roles:
        raise LauncherError(
            f"tfdist runs the chief and worker tasks of a TF_CONFIG only, not {', '.join(sorted(roles))}. "
            f"Remove those tasks, or start them without tfdist. Received TF_CONFIG={text!r}"
        )
    chiefs = [*cluster.get("chief", []), *cluster.get("master", [])]
    addresses = (*chiefs, *cluster.get("worker", []))
    kind, index = task.get("type"), task.get("index")
    group = chiefs if kind in ("chief", "master") else cluster.get("worker", []) if kind == "worker" else None
    if group is None or not isinstance(index, int) or not 0 <= index < len(group) or len(chiefs) > 1:
        raise LauncherError(
            "TF_CONFIG must hold at most one chief, and a task whose type is 'chief' or 'worker' and whose "
            f"index is one of that type's addresses; received task {task!r} and cluster {cluster!r}."
        )
    if len(set(addresses)) != len(addresses):
        raise LauncherError(f"TF_CONFIG names the same address twice: {', '.join(addresses)}.")
    rank = index if kind != "worker" else len(chiefs) + index
    hosts = [address.rpartition(":")[0] for address in addresses]
    names = list(dict.fromkeys(hosts))
    return ClusterSpec(
        rank=rank,
        size=len(addresses),
        local_rank=hosts[:rank].count(hosts[rank]),
        local_size=hosts.count(hosts[rank]),
        cross_rank=names.index(hosts[rank]),
        cross_size=len(names),
        launcher="tf_config",
        job=f"tf_config-{hashlib.sha256(' '.join(addresses).encode()).hexdigest()[:16]}",
        addresses=addresses,
    )


def _read_slurm(environ: Mapping[str, str]) -> ClusterSpec | None:
    if not _in_slurm_step(environ):
        return None
    names = ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID"]
    rank, size, local_rank, node = _integers(environ, names, by="srun") or [0, 0, 0, 0]
    names.append("SLURM_STEP_TASKS_PER_NODE")
    shown = _show(environ, names)
    per_node = _tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""), shown)
    if sum(per_node) != size or not 0 <= node < len(per_node):
        raise LauncherError(
            f"Slurm's variables contradict each other: {shown}. SLURM_STEP_TASKS_PER_NODE must add up to "
            "SLURM_STEP_NUM_TASKS and have an entry for SLURM_NODEID."
        )
    values = [rank, size, local_rank, per_node[node]]
    return _placed("slurm", values, [node, len(per_node)], _slurm_job(environ), shown)


_READERS = (_read_tfdist, _read_horovodrun, _read_openmpi, _read_mpich, _read_tf_config, _read_slurm)

_SIGNS = {
    "tfdist": ["TFDIST_RANK", "TFDIST_SIZE"],
    "horovodrun": ["HOROVOD_RANK", "HOROVOD_SIZE"],
    "openmpi": ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"],
    "mpich": ["PMI_RANK", "PMI_SIZE"],
    "tf_config": ["TF_CONFIG"],
    "slurm": ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS"],
}


def _is_hydra(environ: Mapping[str, str]) -> bool:
    return "MPI_LOCALRANKID" in environ and "PMI_RANK" in environ


def _mpich_job(environ: Mapping[str, str], *, one_host: bool) -> str:
    for name in ("PMI_JOBID", "PALS_APID"):
        if environ.get(name):
            return f"mpich-{environ[name]}"
    # Hydra names the job only to programs that speak PMI. On one host its proxy is every rank's ancestor.
    proxy = _hydra_proxy() if one_host and _is_hydra(environ) else None
    if proxy:
        return f"mpich-{proxy}"
    # In an allocation on several hosts Hydra starts its proxies by one Slurm step per job.
    return f"mpich-{_slurm_job(environ)}" if _is_hydra(environ) and _in_slurm_step(environ) else ""


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


def _slurm_job(environ: Mapping[str, str]) -> str:
    return f"slurm-{environ.get('SLURM_JOB_ID', '')}.{environ['SLURM_STEP_ID']}"


def _in_slurm_step(environ: Mapping[str, str]) -> bool:
    """Whether `srun` started this process; the shells of `sbatch` and `salloc` are steps by name only."""
    step = environ.get("SLURM_STEP_ID", "")
    # 0xfffffff0 and above are Slurm's reserved steps: batch script, interactive shell, extern.
    return step.isdigit() and int(step) < 0xFFFFFFF0


def _tasks_per_node(text: str, shown: str) -> list[int]:
    """`2(x3),1` -> [2, 2, 2, 1]."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise LauncherError(f"SLURM_STEP_TASKS_PER_NODE must read like '2(x3),1'. Received {shown}.")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _cluster_and_task(config: Any, text: str) -> tuple[dict[str, list[str]], dict[str, Any]]:
    cluster = config.get("cluster") if isinstance(config, dict) else None
    task = config.get("task") if isinstance(config, dict) else None
    well_formed = isinstance(config, dict) and all(
        value is None or isinstance(value, dict) for value in (cluster, task)
    )
    for addresses in (cluster or {}).values() if well_formed else ():
        well_formed = well_formed and isinstance(addresses, list)
        well_formed = well_formed and all(
            isinstance(a, str) and re.fullmatch(r".+:\d+", a) for a in addresses
        )
    if not well_formed:
        raise LauncherError(
            'TF_CONFIG must read like {"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", '
            f'"index": 0}}}}. Received {text!r}.'
        )
    return {kind: list(listed) for kind, listed in (cluster or {}).items() if listed}, dict(task or {})


def _integers(environ: Mapping[str, str], names: list[str], *, by: str) -> list[int] | None:
    """The variables' values; None when none of them is set."""
    present = [name for name in names if environ.get(name, "").strip()]
    if not present:
        return None
    missing = [name for name in names if name not in present]
    if missing:
        raise LauncherError(
            f"{_show(environ, present)}, but {', '.join(missing)} not set; {by} sets all of them. "
            "Export the missing ones, or unset the others to run alone."
        )
    wrong = [name for name in names if not re.fullmatch(r"\d{1,9}", environ[name].strip())]
    if wrong:
        raise LauncherError(
            f"{' and '.join(wrong)} must be a whole number >= 0. Received {_show(environ, wrong)}."
        )
    return [int(environ[name]) for name in names]


def _placed(launcher: str, place: list[int], cross: list[int] | None, job: str, shown: str) -> ClusterSpec:
    """Checks rank, size, local rank and local size, and works out the host's number where it is not given."""
    rank, size, local_rank, local_size = place
    cross_rank, cross_size = cross or _cross_place(*place) if local_size else (0, 1)
    rules = {
        f"rank {rank} must be below size {size}": rank < size,
        f"local size {local_size} must be between 1 and size {size}": 1 <= local_size <= size,
        f"local rank {local_rank} must be below local size {local_size}": local_rank < local_size,
        f"host number {cross_rank} must be below the number of hosts {cross_size}": cross_rank < cross_size,
        f"{cross_size} hosts cannot share {size} processes": cross_size <= size,
    }
    broken = [rule for rule, holds in rules.items() if not holds]
    if broken:
        raise LauncherError(f"Impossible place of a process: {'; '.join(broken)}. Received {shown}.")
    return ClusterSpec(rank, size, local_rank, local_size, cross_rank, cross_size, launcher, job)


def _cross_place(rank: int, size: int, local_rank: int, local_size: int) -> list[int]:
    """Number of this host and of hosts, for launchers that don't say.

    Exact when all hosts run equally many ranks, placed host by host; otherwise an estimate that `with_hosts`
    corrects.
    """
    hosts = -(-size // local_size)
    in_turn = rank // hosts == local_rank and rank % local_size != local_rank
    return [rank % hosts if in_turn else min(rank // local_size, hosts - 1), hosts]


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


def _show(environ: Mapping[str, str], names: list[str]) -> str:
    return ", ".join(f"{name}={environ[name]}" if name in environ else f"{name} unset" for name in names)
