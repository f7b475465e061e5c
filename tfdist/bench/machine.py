"""What was measured on: without it, figures mean nothing. Nothing that identifies the machine's owner."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from pathlib import Path
from typing import Any

import tfdist
from tfdist import resources
from tfdist.collectives.horovod_probe import installed_horovod, installed_tensorflow


def describe_machine() -> dict[str, Any]:
    """CPU, cores, memory, system and versions, for people and programs alike."""
    horovod, tensorflow = installed_horovod(), installed_tensorflow()
    return {
        "CPU": _cpu_model(),
        "cores": resources.usable_cores(),
        "memory": _memory(),
        "system": f"{platform.system()} {re.sub(r'[^0-9.].*', '', platform.release())}",
        "Python": platform.python_version(),
        "TensorFlow": " ".join(tensorflow) if tensorflow else "none",
        "Keras": _version("keras"),
        "tf_keras": _version("tf_keras"),
        "Horovod": f"{horovod.version} ({', '.join(sorted(horovod.features))})" if horovod else "none",
        "tfdist": tfdist.__version__,
    }


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


def _memory() -> str:
    meminfo = Path("/proc/meminfo")
    match = (
        re.search(r"^MemTotal:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE) if meminfo.exists() else None
    )
    return f"{int(match[1]) / 2**20:.0f} GiB" if match else "unknown"


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "none"
