"""What this machine gives this process: cores and memory, within the limits of a container."""

from __future__ import annotations

import os
import re
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")  # version 2


def usable_cores() -> int:
    """CPU cores that this process may use; a container's quota of less than one counts as one."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    try:
        quota, period = (_CGROUP / "cpu.max").read_text().split()
        return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):
        return cores


def free_memory() -> int:
    """Bytes that new processes can take without swapping; 0 if unknown."""
    limits = []
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", _MEMINFO.read_text(), re.MULTILINE)
        if found:
            limits.append(int(found[1]) * 1024)
    except OSError:
        pass
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = (_CGROUP / "memory.current").read_text().strip()
        if limit != "max":
            limits.append(max(0, int(limit) - int(used)))
    except (OSError, ValueError):
        pass
    return min(limits, default=0)
