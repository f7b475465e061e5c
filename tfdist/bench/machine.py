"""What was measured on: without it, figures mean nothing. Nothing that identifies the machine's owner."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from pathlib import Path
from typing import Any

import tfdist
from tfdist.collectives.horovod_probe import installed_horovod, installed_tensorflow


def describe_machine() -> dict[str, Any]:
    """CPU, cores, memory, system and versions, for people and programs alike."""
    horovod, tensorflow = installed_horovod(), installed_tensorflow()
    return {
        "CPU": _cpu_model(),
        "cores": usable_cores(),
        "memory": f"{_memory() / 2**30:.0f} GiB" if _memory() else "unknown",
        "system": f"{platform.system()} {re.sub(r'[^0-9.].*', '', platform.release())}",
        "Python": platform.python_version(),
        "TensorFlow": " ".join(tensorflow) if tensorflow else "none",
        "Keras": _version("keras"),
        "tf_keras": _version("tf_keras"),
        "Horovod": f"{horovod.version} ({', '.join(sorted(horovod.features))})" if horovod else "none",
        "tfdist": tfdist.__version__,
    }


def usable_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_memory() -> int:
    """Bytes that new processes can take without swapping; 0 if unknown."""
    return _memory_line("MemAvailable")


def load() -> float:
    """Processes that wanted a core during the last minute, on average."""
    return os.getloadavg()[0]


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        match = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(errors="replace"), re.MULTILINE)
        if match:
            return match[1].strip()
    return platform.processor() or platform.machine()


def _memory() -> int:
    return _memory_line("MemTotal")


def _memory_line(name: str) -> int:
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return 0
    match = re.search(rf"^{name}:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "none"
