"""Puts a Horovod wheel, and what Horovod imports, into this Python's environment."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tfdist.collectives.horovod_probe import HorovodBuild, installed_horovod
from tfdist.errors import BackendUnavailableError

# Module to import -> package that brings it; Horovod imports these at run time.
_RUNTIME_PACKAGES = {
    "psutil": "psutil",
    "cloudpickle": "cloudpickle",
    "yaml": "pyyaml",
    "packaging": "packaging",
}

Tell = Callable[[str], None]


def install_wheel(wheel: Path, features: Sequence[str], *, tell: Tell) -> None:
    tell(f"installing {wheel.name}")
    _pip_install(["--no-deps", "--force-reinstall", str(wheel)], what=f"install {wheel}")
    importlib.invalidate_caches()
    installed = installed_horovod()
    if installed is None or reason_to_replace(installed, features):
        where = f"{installed.location} comes first" if installed else "none is found"
        raise BackendUnavailableError(
            f"pip installed {wheel.name}, but `import horovod` finds another: {where}. "
            "Remove that one, or its folder from PYTHONPATH."
        )


def lacking_runtime_packages() -> list[str]:
    return [
        package for module, package in _RUNTIME_PACKAGES.items() if importlib.util.find_spec(module) is None
    ]


def install_runtime_packages(*, tell: Tell) -> None:
    needed = lacking_runtime_packages()
    if needed:
        tell(f"installing what Horovod imports: {', '.join(needed)}")
        _pip_install(needed, what=f"install {', '.join(needed)}")
        importlib.invalidate_caches()


def _pip_install(arguments: Sequence[str], *, what: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    result = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=900
    )
    if result.returncode:
        text = "\n".join(f"    {line[:300]}" for line in result.stderr.strip().splitlines()[:8])
        hint = ""
        if "externally-managed" in text or "Permission denied" in text:
            hint = "\n  fix: use a virtual environment (python -m venv .venv) that has TensorFlow"
        raise BackendUnavailableError(f"pip could not {what}:\n{text}{hint}")


def reason_to_replace(installed: HorovodBuild, features: Sequence[str]) -> str:
    """Why an installed Horovod won't do for these features; empty if it may."""
    if installed.problem:
        return f"replacing: {installed.problem}"
    lacking = sorted(set(features) - installed.features)
    if lacking:
        return f"replacing: the installed Horovod was built without {', '.join(lacking)}"
    return ""
