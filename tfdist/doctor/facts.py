"""What is here: versions, devices, launcher, network. Collected without judging, within a bound.

TensorFlow and Keras are asked in a process of their own: their import may fail, crash, or print, and the
doctor must survive that. Nothing that may be secret is recorded: of proxies and the like only the names.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tfdist
from tfdist import cluster, resources
from tfdist.collectives.horovod_probe import installed_horovod, installed_tensorflows, loading_problem
from tfdist.errors import LauncherError

_REQUIRED_PACKAGES = ("numpy", "keras", "wrapt", "cloudpickle")
_PROXIES = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")

# Prints one line of JSON; each half reports its own failure, so that the other still counts.
_ASK_FRAMEWORKS = """
import json, sys
facts = {}
def failure(error):
    return (type(error).__name__ + ": " + str(error)).strip().splitlines()[0][:300]
try:
    import tensorflow as tf
    facts["tensorflow_version"] = tf.__version__
    facts["tensorflow_cuda"] = bool(tf.test.is_built_with_cuda())
    names = []
    for gpu in tf.config.list_physical_devices("GPU"):
        details = tf.config.experimental.get_device_details(gpu)
        names.append(str(details.get("device_name", gpu.name)))
    facts["gpus"] = names
except BaseException as error:
    facts["tensorflow_error"] = failure(error)
try:
    import keras
    facts["keras_version"] = keras.__version__
    facts["keras_backend"] = keras.config.backend() if hasattr(keras, "config") else ""
except BaseException as error:
    facts["keras_error"] = failure(error)
print("\\nTFDIST_FACTS " + json.dumps(facts), flush=True)
"""


@dataclasses.dataclass(frozen=True)
class HorovodFacts:
    """The installed Horovod: version, TensorFlow it was built for, features, and why it can't be used."""

    version: str
    built_for: str
    features: tuple[str, ...]
    problem: str = ""


@dataclasses.dataclass(frozen=True)
class Facts:
    """Everything the doctor looks at. Defaults describe a healthy machine, so that tests state only ills.

    Attributes:
        tfdist: version of tfdist.
        python: version of Python.
        executable: path of the interpreter.
        system: operating system, release and machine.
        cores: CPUs this process may use.
        memory: free memory in bytes; 0 if unknown.
        shared_memory: size of /dev/shm in bytes; None where there is none.
        open_files: how many files a process may have open.
        missing_packages: packages tfdist imports that are not installed.
        tensorflow_distributions: (name, version) of every installed distribution of TensorFlow.
        tensorflow_version: what `import tensorflow` says; empty if it failed.
        tensorflow_error: why it failed.
        tensorflow_cuda: whether it is built with CUDA.
        gpus: names of the GPUs that TensorFlow sees.
        nvidia_devices: how many GPUs the operating system shows.
        keras_version: what `import keras` says; empty if it failed.
        keras_error: why it failed.
        keras_backend: the backend Keras chose.
        keras_backend_source: what chose it: `KERAS_BACKEND`, the path of keras.json, or empty.
        legacy_keras: whether TF_USE_LEGACY_KERAS asks for Keras 2.
        horovod: the installed Horovod, or None.
        mpirun: path of an mpirun; empty without.
        mpirun_version: name and version of its MPI.
        launcher: name of the launcher seen, `none` without.
        launcher_place: rank and size as text.
        launcher_size: number of ranks the launcher started.
        launcher_error: why its variables make no sense.
        host: this host's name.
        host_address: what the name resolves to; empty if it doesn't.
        host_is_own: whether that address belongs to this machine.
        proxies: names of proxy variables that are set.
        proxy_spares_local: whether no_proxy exempts 127.0.0.1 and localhost.
    """

    tfdist: str = tfdist.__version__
    python: str = "3.11.0"
    executable: str = "python"
    system: str = "Linux"
    cores: int = 8
    memory: int = 16 * 10**9
    shared_memory: int | None = 8 * 10**9
    open_files: int = 1_048_576
    missing_packages: tuple[str, ...] = ()
    tensorflow_distributions: tuple[tuple[str, str], ...] = (("tensorflow-cpu", "2.21.0"),)
    tensorflow_version: str = "2.21.0"
    tensorflow_error: str = ""
    tensorflow_cuda: bool = False
    gpus: tuple[str, ...] = ()
    nvidia_devices: int = 0
    keras_version: str = "3.15.1"
    keras_error: str = ""
    keras_backend: str = "tensorflow"
    keras_backend_source: str = ""
    legacy_keras: bool = False
    horovod: HorovodFacts | None = HorovodFacts("0.28.1", "2.21.0", ("gloo", "mpi"))
    mpirun: str = ""
    mpirun_version: str = ""
    launcher: str = "none"
    launcher_place: str = "rank 0 of 1"
    launcher_size: int = 1
    launcher_error: str = ""
    host: str = "host"
    host_address: str = "127.0.1.1"
    host_is_own: bool = True
    proxies: tuple[str, ...] = ()
    proxy_spares_local: bool = False


def gather_facts(environ: Mapping[str, str], *, timeout: float) -> Facts:
    """Looks at this machine and environment.

    Args:
        environ: environment variables.
        timeout: bound in seconds for each question asked in another process.
    """
    frameworks = _ask_frameworks(environ, timeout=timeout)
    launcher = _see_launcher(environ)
    mpirun, mpirun_version = _find_mpirun()
    host, address, own = _resolve_own_name()
    return Facts(
        python=platform.python_version(),
        executable=sys.executable,
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cores=resources.usable_cores(),
        memory=resources.free_memory(),
        shared_memory=_size_of(Path("/dev/shm")),
        open_files=_open_file_limit(),
        missing_packages=tuple(name for name in _REQUIRED_PACKAGES if importlib.util.find_spec(name) is None),
        tensorflow_distributions=tuple(installed_tensorflows()),
        tensorflow_version=frameworks.get("tensorflow_version", ""),
        tensorflow_error=frameworks.get("tensorflow_error", ""),
        tensorflow_cuda=frameworks.get("tensorflow_cuda", False),
        gpus=tuple(frameworks.get("gpus", ())),
        nvidia_devices=len(list(Path("/dev").glob("nvidia[0-9]*"))),
        keras_version=frameworks.get("keras_version", ""),
        keras_error=frameworks.get("keras_error", ""),
        keras_backend=frameworks.get("keras_backend", ""),
        keras_backend_source=_keras_backend_source(environ),
        legacy_keras=environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true"),
        horovod=_describe_horovod(timeout=timeout),
        mpirun=mpirun,
        mpirun_version=mpirun_version,
        host=host,
        host_address=address,
        host_is_own=own,
        proxies=tuple(n for n in _PROXIES if environ.get(n) or environ.get(n.upper())),
        proxy_spares_local=spares_local(environ.get("no_proxy") or environ.get("NO_PROXY") or ""),
        **launcher,
    )


def spares_local(no_proxy: str) -> bool:
    """Whether a `no_proxy` list exempts this machine's own addresses from the proxy.

    Example:
        >>> spares_local("localhost,127.0.0.1,.example.org"), spares_local(".example.org")
        (True, False)
    """
    entries = {entry.strip() for entry in no_proxy.split(",")}
    if "*" in entries:
        return True
    return "localhost" in entries and bool(entries & {"127.0.0.1", "127.0.0.0/8", "127.*"})


def _ask_frameworks(environ: Mapping[str, str], *, timeout: float) -> dict[str, Any]:
    environment = {**environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    try:
        result = subprocess.run(
            [sys.executable, "-c", _ASK_FRAMEWORKS],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            timeout=timeout,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return {"tensorflow_error": f"import tensorflow took more than {timeout:g} s"}
    for line in result.stdout.splitlines():
        if line.startswith("TFDIST_FACTS "):
            answer: dict[str, Any] = json.loads(line.removeprefix("TFDIST_FACTS "))
            return answer
    return {"tensorflow_error": f"import tensorflow ended the process with code {result.returncode}"}


def _keras_backend_source(environ: Mapping[str, str]) -> str:
    """What tells Keras its backend; the variable wins over the file, as in Keras."""
    if environ.get("KERAS_BACKEND"):
        return "KERAS_BACKEND"
    home = environ.get("KERAS_HOME")
    path = (Path(home) if home else Path.home() / ".keras") / "keras.json"
    return str(path) if path.is_file() else ""


def _describe_horovod(*, timeout: float) -> HorovodFacts | None:
    build = installed_horovod()
    if build is None:
        return None
    problem = loading_problem(build, timeout=timeout)
    return HorovodFacts(build.version, build.tensorflow, tuple(sorted(build.features)), problem)


def _find_mpirun() -> tuple[str, str]:
    path = shutil.which("mpirun") or shutil.which("mpirun", path=str(Path(sys.executable).parent))
    if path is None:
        return "", ""
    try:
        said = subprocess.run(
            [path, "--version"], capture_output=True, text=True, errors="replace", timeout=20
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return path, ""
    return path, describe_mpirun(said)


def describe_mpirun(said: str) -> str:
    """Name and version out of what `mpirun --version` prints.

    Example:
        >>> describe_mpirun("mpirun (Open MPI) 5.0.11\\n\\nReport bugs to ...")
        'Open MPI 5.0.11'
        >>> describe_mpirun("HYDRA build details:\\n    Version:        4.0.2\\n")
        'MPICH 4.0.2'
    """
    open_mpi = re.search(r"\((?:Open MPI|OpenRTE)\) (\S+)", said)
    if open_mpi:
        return f"Open MPI {open_mpi.group(1)}"
    hydra = re.search(r"HYDRA build details:\s+Version:\s+(\S+)", said)
    if hydra:
        return f"MPICH {hydra.group(1)}"
    return next((line.strip() for line in said.splitlines() if line.strip()), "unknown MPI")


def _see_launcher(environ: Mapping[str, str]) -> dict[str, Any]:
    try:
        spec = cluster.from_environment(environ)
    except LauncherError as error:
        return {"launcher": "unclear", "launcher_place": "", "launcher_error": str(error)}
    place = f"rank {spec.rank} of {spec.size}"
    if spec.cross_size > 1:
        place += f", host {spec.cross_rank} of {spec.cross_size}"
    return {"launcher": spec.launcher, "launcher_place": place, "launcher_size": spec.size}


def _resolve_own_name() -> tuple[str, str, bool]:
    """This host's name, its address, and whether a socket can be bound to it: then it is our own."""
    host = socket.gethostname()
    try:
        address = socket.gethostbyname(host)
    except OSError:
        return host, "", False
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return host, address, False
    return host, address, True


def _size_of(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).total
    except OSError:
        return None


def _open_file_limit() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return 1_048_576
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1_048_576 if limit == resource.RLIM_INFINITY else limit
