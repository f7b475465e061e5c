"""What is wrong, how bad, and what to do: pure functions of facts and trials.

A finding is an error if it keeps models from training, a warning if it will hurt sooner or later, a note if
something better is one command away. Each states what was seen and the fix. A new lesson from a support case
is a new function here and a row in its test's table.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Callable, Iterator, Sequence

from tfdist.doctor.facts import Facts
from tfdist.doctor.trials import Trial


class Severity(enum.Enum):
    """How bad a finding is."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One problem: what was seen, what it leads to, and the command or action that ends it."""

    severity: Severity
    what: str
    fix: str


def find_problems(facts: Facts, trials: Sequence[Trial]) -> list[Finding]:
    """All findings, the worst first."""
    found = [finding for check in _CHECKS for finding in check(facts)]
    found += check_trials(facts, trials)
    order = list(Severity)
    return sorted(found, key=lambda finding: order.index(finding.severity))


def can_train(findings: Sequence[Finding]) -> bool:
    """Whether nothing found keeps models from training."""
    return all(finding.severity is not Severity.ERROR for finding in findings)


def check_packages(facts: Facts) -> Iterator[Finding]:
    if facts.missing_packages:
        names = " ".join(facts.missing_packages)
        yield Finding(
            Severity.ERROR, f"tfdist needs packages that are not installed: {names}", f"pip install {names}"
        )


def check_tensorflow(facts: Facts) -> Iterator[Finding]:
    names = [name for name, _ in facts.tensorflow_distributions]
    if len(names) > 1:
        listed = ", ".join(f"{name} {version}" for name, version in facts.tensorflow_distributions)
        yield Finding(
            Severity.WARNING,
            f"Several distributions of TensorFlow are installed over each other: {listed}. "
            "Their files mix, and libraries built for one crash in the other",
            f"pip uninstall -y {' '.join(names)}, then install one of them",
        )
    if facts.tensorflow_error:
        if not names:
            yield Finding(
                Severity.ERROR,
                f"TensorFlow is not installed ({facts.tensorflow_error})",
                "pip install tensorflow-cpu, or tensorflow[and-cuda] for GPUs",
            )
        else:
            yield Finding(
                Severity.ERROR,
                f"`import tensorflow` fails: {facts.tensorflow_error}",
                f"pip install --force-reinstall {names[0]}",
            )
    elif _numbers(facts.tensorflow_version) < (2, 16):
        yield Finding(
            Severity.ERROR,
            f"TensorFlow {facts.tensorflow_version} is older than 2.16, the first with Keras 3",
            f"pip install -U {names[0] if names else 'tensorflow'}",
        )


def check_keras(facts: Facts) -> Iterator[Finding]:
    if facts.legacy_keras:
        yield Finding(
            Severity.ERROR,
            "TF_USE_LEGACY_KERAS is set: tf.keras is then Keras 2, and tfdist works on Keras 3",
            "unset TF_USE_LEGACY_KERAS",
        )
    if facts.keras_error and "keras" not in facts.missing_packages and not facts.tensorflow_error:
        yield Finding(
            Severity.ERROR,
            f"`import keras` fails: {facts.keras_error}",
            "pip install -U --force-reinstall keras",
        )
    elif facts.keras_version and _numbers(facts.keras_version) < (3, 0):
        yield Finding(
            Severity.ERROR,
            f"Keras {facts.keras_version} is Keras 2; tfdist works on Keras 3",
            'pip install -U "keras>=3.3"',
        )
    elif facts.keras_backend not in ("", "tensorflow"):
        fix = "set KERAS_BACKEND=tensorflow"
        if facts.keras_backend_source not in ("", "KERAS_BACKEND"):
            fix += f', or "backend": "tensorflow" in {facts.keras_backend_source}'
        chosen = f" (from {facts.keras_backend_source})" if facts.keras_backend_source else ""
        yield Finding(
            Severity.ERROR,
            f"Keras runs on {facts.keras_backend}{chosen}; tfdist moves TensorFlow's tensors",
            fix,
        )


def check_launcher(facts: Facts) -> Iterator[Finding]:
    if facts.launcher_error:
        yield Finding(
            Severity.ERROR,
            f"The launcher's variables contradict each other: {facts.launcher_error}",
            "unset those that an earlier shell or job left behind",
        )


def check_gpus(facts: Facts) -> Iterator[Finding]:
    if facts.tensorflow_error:
        return
    if facts.nvidia_devices and not facts.tensorflow_cuda:
        yield Finding(
            Severity.WARNING,
            f"This machine has {facts.nvidia_devices} NVIDIA GPU(s), but this TensorFlow is built for CPUs",
            "pip uninstall -y tensorflow-cpu && pip install tensorflow[and-cuda]",
        )
    elif facts.nvidia_devices and not facts.gpus:
        yield Finding(
            Severity.WARNING,
            f"This machine has {facts.nvidia_devices} NVIDIA GPU(s), but TensorFlow sees none: its CUDA "
            "libraries are missing, the driver is too old, or CUDA_VISIBLE_DEVICES hides them",
            "pip install tensorflow[and-cuda]; compare nvidia-smi and CUDA_VISIBLE_DEVICES",
        )
    if len(facts.gpus) > 1 and (facts.horovod is None or "nccl" not in facts.horovod.features):
        yield Finding(
            Severity.NOTE,
            f"{len(facts.gpus)} GPUs are here, but Horovod is not built with NCCL: gradients travel through "
            "the CPU",
            "tfdist build-horovod --with gloo,nccl",
        )


def check_horovod(facts: Facts) -> Iterator[Finding]:
    if facts.horovod is None:
        yield Finding(
            Severity.NOTE,
            "Horovod, the faster engine, is not installed; TensorFlow's own collectives serve",
            "tfdist build-horovod  (some minutes, once)",
        )
        return
    if facts.horovod.problem:
        yield Finding(
            Severity.WARNING,
            "The installed Horovod can't be used, TensorFlow's collectives serve instead: "
            f"{facts.horovod.problem}",
            "tfdist build-horovod",
        )
    elif facts.mpirun and "mpi" not in facts.horovod.features:
        yield Finding(
            Severity.WARNING,
            f"{facts.mpirun} is here, but Horovod is built without MPI: a script that uses Horovod directly "
            "would, started by mpirun, be as many separate worlds of size 1 (tfdist itself uses Gloo then)",
            "tfdist build-horovod --with gloo,mpi",
        )


def check_network(facts: Facts) -> Iterator[Finding]:
    if not facts.host_address:
        yield Finding(
            Severity.WARNING,
            f"This host's name, {facts.host}, doesn't resolve: worlds of several hosts can't meet, and "
            "MPI may wait long at the start",
            f'add a line "<address> {facts.host}" to /etc/hosts, or repair DNS',
        )
    elif not facts.host_is_own:
        yield Finding(
            Severity.WARNING,
            f"This host's name, {facts.host}, resolves to {facts.host_address}, which is not an address of "
            "this machine: other ranks would call there and hang",
            f"correct the address of {facts.host} in /etc/hosts or DNS",
        )
    if facts.proxies and not facts.proxy_spares_local:
        yield Finding(
            Severity.WARNING,
            f"{', '.join(facts.proxies)} is set without exempting this machine: gRPC, and so TensorFlow's "
            "collectives, may send traffic between ranks to the proxy and hang",
            "export no_proxy=localhost,127.0.0.1,<the other hosts of the job>",
        )


def check_resources(facts: Facts) -> Iterator[Finding]:
    if facts.shared_memory is not None and facts.shared_memory < 512 * 2**20:
        yield Finding(
            Severity.WARNING,
            f"/dev/shm holds only {facts.shared_memory / 2**20:.0f} MiB; MPI and NCCL pass data between "
            "ranks of one host through it",
            "start the container with --shm-size=2g (Docker), or enlarge the tmpfs",
        )
    if 0 < facts.memory < 2 * 10**9:
        yield Finding(
            Severity.WARNING,
            f"Only {facts.memory / 1e9:.1f} GB of memory are free; each rank takes 0.5 GB before its model",
            "end other programs, or start fewer ranks on this host",
        )
    if facts.open_files < 1024:
        yield Finding(
            Severity.WARNING,
            f"A process may open only {facts.open_files} files; ranks keep a connection to every other rank",
            "ulimit -n 4096",
        )


def check_trials(facts: Facts, trials: Sequence[Trial]) -> Iterator[Finding]:
    """Judges the all-reduces: a failure is an error on the backend that training would take."""
    for trial in trials:
        if not trial.error:
            continue
        if trial.backend == "tf":
            yield Finding(
                Severity.ERROR,
                f"Two processes can't all-reduce on the tf backend: {trial.error}",
                "see findings about the network; `tfdist doctor --verbose` shows what the processes said",
            )
        elif trial.backend == "horovod" and facts.horovod is not None and not facts.horovod.problem:
            # backend="auto" would choose it, since it loads.
            yield Finding(
                Severity.ERROR,
                f"Horovod loads, but two processes can't all-reduce with it: {trial.error}",
                "tfdist build-horovod --rebuild; until then train with --backend tf",
            )
        elif trial.backend == "horovod+mpi":
            yield Finding(
                Severity.WARNING,
                f"Horovod can't all-reduce under mpirun: {trial.error}",
                "put the mpirun of that MPI first on PATH, or use `tfdist run`, which needs none",
            )


_CHECKS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    check_packages,
    check_tensorflow,
    check_keras,
    check_launcher,
    check_gpus,
    check_horovod,
    check_network,
    check_resources,
)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
