"""Who and where am I: the launcher's environment, read once into a `ClusterSpec`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


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
    """Reads the launcher's variables; raises `LauncherError` when they contradict each other."""
    raise NotImplementedError
