"""What to build and what it depends on: resolves features against the machine, names all that is missing."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence

from tfdist.collectives.horovod_probe import installed_tensorflow
from tfdist.errors import BackendUnavailableError
from tfdist.launch import horovod_compile, horovod_toolchain
from tfdist.launch.horovod_toolchain import FEATURES, Cuda, Machine, Missing, Mpi, Nccl
from tfdist.launch.horovod_wheels import Ingredients, tensorflow_build

_OLDEST_TENSORFLOW = (2, 16)

Tell = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class BuildPlan:
    """What to build, with the parts of the machine it needs."""

    features: tuple[str, ...]
    mpi: Mpi | None = None
    nccl: Nccl | None = None
    cuda: Cuda | None = None
    capabilities: tuple[int, ...] = ()


def plan_build(
    machine: Machine, features: Sequence[str] | None, *, capabilities: Sequence[int] | None, tell: Tell
) -> BuildPlan:
    """Resolves what to build; raises with everything that is missing for it."""
    unknown = sorted(set(features or ()) - set(FEATURES))
    if unknown:
        raise BackendUnavailableError(
            f"Horovod's features are {', '.join(FEATURES)}; received {', '.join(unknown)}."
        )
    missing = check_python(machine)
    wanted = {"gloo", *(features or ())}
    mpi = nccl = cuda = None
    if features is None or "mpi" in wanted:
        found_mpi = horovod_toolchain.find_mpi(machine)
        if isinstance(found_mpi, Mpi):
            mpi = found_mpi
            wanted.add("mpi")
        elif features is not None:
            missing.append(found_mpi)
        else:
            tell(f"without MPI ({found_mpi.why}); to have it: {found_mpi.fix}")
    if "nccl" in wanted:
        found_cuda = horovod_toolchain.find_cuda(machine)
        cuda = found_cuda if isinstance(found_cuda, Cuda) else None
        found_nccl = horovod_toolchain.find_nccl(machine, cuda_home=cuda.home if cuda else None)
        nccl = found_nccl if isinstance(found_nccl, Nccl) else None
        missing += [found for found in (found_cuda, found_nccl) if isinstance(found, Missing)]
    if missing:
        compiler = horovod_toolchain.find_compiler(machine)
        missing += [compiler] if isinstance(compiler, Missing) else []
        raise BackendUnavailableError(describe_missing(missing))
    chosen = tuple(sorted(capabilities or (cuda.capabilities if cuda else ())))
    return BuildPlan(tuple(sorted(wanted)), mpi, nccl, cuda, chosen)


def check_python(machine: Machine) -> list[Missing]:
    """What this Python lacks: TensorFlow of a supported version, pip, a supported system."""
    missing = []
    if sys.platform not in ("linux", "darwin"):
        missing.append(
            Missing(
                "Linux or macOS", f"Horovod doesn't build on {sys.platform}", "use WSL 2, or the tf backend"
            )
        )
    tensorflow = installed_tensorflow()
    if tensorflow is None and machine.package_folder("tensorflow") is None:
        missing.append(
            Missing(
                "TensorFlow",
                f"not installed for {sys.executable}; Horovod is compiled against it",
                "pip install tensorflow-cpu  (or tensorflow[and-cuda] for GPUs)",
            )
        )
    elif tensorflow is not None:
        numbers = tuple(int(number) for number in re.findall(r"\d+", tensorflow[1])[:2])
        if numbers < _OLDEST_TENSORFLOW:
            missing.append(
                Missing(
                    "TensorFlow 2.16 or later",
                    f"found {' '.join(tensorflow)}",
                    f"pip install -U {tensorflow[0]}",
                )
            )
    if importlib.util.find_spec("pip") is None:
        missing.append(
            Missing("pip", f"{sys.executable} has none", f"{sys.executable} -m ensurepip --upgrade")
        )
    return missing


def describe_missing(missing: Sequence[Missing]) -> str:
    """One message for everything that is missing."""
    return "Horovod can't be built here yet. Missing:\n" + "\n".join(f"  - {item}" for item in missing)


def ingredients(plan: BuildPlan) -> Ingredients:
    name, version = installed_tensorflow() or ("tensorflow", "unknown")
    nccl = ""
    if plan.nccl and plan.cuda:
        devices = ",".join(map(str, plan.capabilities))
        nccl = f"{plan.nccl.version} {plan.nccl.library} cuda {plan.cuda.release} {devices}"
    suffix = sysconfig.get_config_var("EXT_SUFFIX") or ""
    return Ingredients(
        horovod=horovod_compile.HOROVOD_VERSION,
        tensorflow=version,
        tensorflow_build=tensorflow_build(name),
        python=re.sub(r"^\.(\w+)-(\d+\w*).*$", r"\1\2", suffix) or sys.implementation.cache_tag,
        platform=sysconfig.get_platform(),
        features=plan.features,
        mpi=plan.mpi.identity if plan.mpi else "",
        nccl=nccl,
    )


def cuda_tensorflow_missing(version: str) -> Missing:
    """NCCL's half of Horovod calls TensorFlow's GPU kernels: with a CPU build it links, but never loads."""
    return Missing(
        "TensorFlow with CUDA",
        f"TensorFlow {version} is a CPU build, without the GPU kernels that Horovod's NCCL part calls",
        "pip uninstall tensorflow-cpu && pip install tensorflow[and-cuda]",
    )


def describe_tensorflow() -> dict[str, object]:
    """Imports TensorFlow in another process: the compile needs it to import, and this one may not hold it."""
    program = (
        "import json, os, tensorflow as tf; print('\\n' + json.dumps({'version': tf.__version__, "
        "'include': os.path.isdir(tf.sysconfig.get_include()), "
        "'cuda': bool(tf.sysconfig.get_build_info().get('is_cuda_build'))}))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=300,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"},
    )
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        raise BackendUnavailableError(
            f"`import tensorflow` fails in {sys.executable}: {lines[-1] if lines else result.returncode}. "
            "Repair it first: pip install --force-reinstall tensorflow-cpu"
        )
    about: dict[str, object] = json.loads(result.stdout.strip().splitlines()[-1])
    if not about["include"]:
        raise BackendUnavailableError(
            "This TensorFlow ships no C++ headers, which Horovod needs. "
            "Install the distribution from PyPI: pip install tensorflow-cpu"
        )
    return about
