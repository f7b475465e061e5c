"""The place of a process in its world, and the rules that every launcher's numbers must keep."""

from __future__ import annotations

import dataclasses

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


def placed(launcher: str, place: list[int], cross: list[int] | None, job: str, shown: str) -> ClusterSpec:
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
