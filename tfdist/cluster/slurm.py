"""Slurm: only inside a job step, which `srun` starts; the shell of `sbatch` or `salloc` is one process."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tfdist.cluster.spec import ClusterSpec, placed
from tfdist.cluster.variables import integers, show
from tfdist.errors import LauncherError


def read_slurm(environ: Mapping[str, str]) -> ClusterSpec | None:
    if not in_slurm_step(environ):
        return None
    names = ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID"]
    rank, size, local_rank, node = integers(environ, names, by="srun") or [0, 0, 0, 0]
    names.append("SLURM_STEP_TASKS_PER_NODE")
    shown = show(environ, names)
    per_node = _tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""), shown)
    if sum(per_node) != size or not 0 <= node < len(per_node):
        raise LauncherError(
            f"Slurm's variables contradict each other: {shown}. SLURM_STEP_TASKS_PER_NODE must add up to "
            "SLURM_STEP_NUM_TASKS and have an entry for SLURM_NODEID."
        )
    values = [rank, size, local_rank, per_node[node]]
    return placed("slurm", values, [node, len(per_node)], slurm_job(environ), shown)


def slurm_job(environ: Mapping[str, str]) -> str:
    return f"slurm-{environ.get('SLURM_JOB_ID', '')}.{environ['SLURM_STEP_ID']}"


def in_slurm_step(environ: Mapping[str, str]) -> bool:
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
