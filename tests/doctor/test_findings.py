"""Each problem the doctor knows: what it sees, how bad it finds it, and that the fix is named."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tfdist.doctor.facts import Facts, HorovodFacts
from tfdist.doctor.findings import Severity, can_train, find_problems
from tfdist.doctor.trials import Trial

ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE
GLOO_ONLY = HorovodFacts("0.28.1", "2.21.0", ("gloo",))
TWO_GPUS = ("NVIDIA A100", "NVIDIA A100")

# (change to a healthy machine, severity, words of the finding, words of its fix)
TABLE: list[tuple[dict[str, Any], Severity, str, str]] = [
    ({"missing_packages": ("wrapt",)}, ERROR, "not installed: wrapt", "pip install wrapt"),
    (
        {"tensorflow_distributions": (), "tensorflow_version": "", "tensorflow_error": "No module"},
        ERROR,
        "TensorFlow is not installed",
        "pip install tensorflow-cpu",
    ),
    (
        {"tensorflow_version": "", "tensorflow_error": "ImportError: libfoo.so.1"},
        ERROR,
        "fails: ImportError: libfoo.so.1",
        "--force-reinstall tensorflow-cpu",
    ),
    ({"tensorflow_version": "2.15.1"}, ERROR, "2.15.1 is older than 2.16", "pip install -U tensorflow-cpu"),
    (
        {"tensorflow_distributions": (("tensorflow", "2.21.0"), ("tensorflow-cpu", "2.20.0"))},
        WARNING,
        "tensorflow 2.21.0, tensorflow-cpu 2.20.0",
        "pip uninstall -y tensorflow tensorflow-cpu",
    ),
    ({"keras_version": "2.15.0"}, ERROR, "Keras 2.15.0 is Keras 2", "keras>=3"),
    ({"keras_version": "", "keras_error": "ImportError: x"}, ERROR, "`import keras` fails", "keras"),
    ({"legacy_keras": True}, ERROR, "TF_USE_LEGACY_KERAS", "unset TF_USE_LEGACY_KERAS"),
    (
        {"keras_backend": "torch", "keras_backend_source": "KERAS_BACKEND"},
        ERROR,
        "runs on torch (from KERAS_BACKEND)",
        "set KERAS_BACKEND=tensorflow",
    ),
    (
        {"keras_backend": "jax", "keras_backend_source": "/home/me/.keras/keras.json"},
        ERROR,
        "runs on jax",
        '"backend": "tensorflow" in /home/me/.keras/keras.json',
    ),
    ({"launcher_error": "RANK 3 of 2"}, ERROR, "RANK 3 of 2", "unset"),
    ({"horovod": None}, NOTE, "not installed; TensorFlow's own collectives serve", "tfdist build-horovod"),
    (
        {"horovod": HorovodFacts("0.28.1", "2.16.2", ("gloo",), "compiled with TensorFlow 2.16.2")},
        WARNING,
        "compiled with TensorFlow 2.16.2",
        "tfdist build-horovod",
    ),
    (
        {"horovod": GLOO_ONLY, "mpirun": "/usr/bin/mpirun"},
        WARNING,
        "separate worlds of size 1",
        "build-horovod --with gloo,mpi",
    ),
    ({"host_address": "", "host_is_own": False}, WARNING, "doesn't resolve", "/etc/hosts"),
    (
        {"host_address": "10.0.0.9", "host_is_own": False},
        WARNING,
        "resolves to 10.0.0.9, which is not an address of this machine",
        "/etc/hosts",
    ),
    ({"proxies": ("http_proxy",)}, WARNING, "http_proxy is set", "no_proxy=localhost,127.0.0.1"),
    ({"shared_memory": 64 * 2**20}, WARNING, "/dev/shm holds only 64 MiB", "--shm-size"),
    ({"memory": 10**9}, WARNING, "1.0 GB of memory", "fewer ranks"),
    ({"open_files": 256}, WARNING, "256 files", "ulimit -n"),
    ({"nvidia_devices": 4}, WARNING, "4 NVIDIA GPU(s), but this TensorFlow is built for CPUs", "and-cuda"),
    (
        {"nvidia_devices": 4, "tensorflow_cuda": True},
        WARNING,
        "TensorFlow sees none",
        "nvidia-smi and CUDA_VISIBLE_DEVICES",
    ),
    (
        {"nvidia_devices": 2, "tensorflow_cuda": True, "gpus": TWO_GPUS},
        NOTE,
        "not built with NCCL",
        "build-horovod --with gloo,nccl",
    ),
]


@pytest.mark.parametrize(
    ("change", "severity", "what", "fix"), TABLE, ids=[", ".join(row[0]) for row in TABLE]
)
def test_each_problem_is_found_alone_with_its_fix(
    change: dict[str, Any], severity: Severity, what: str, fix: str
) -> None:
    (finding,) = find_problems(Facts(**change), [])
    assert finding.severity is severity
    assert what in finding.what
    assert fix in finding.fix
    assert can_train([finding]) == (severity is not ERROR)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"proxies": ("http_proxy",), "proxy_spares_local": True},
        {"shared_memory": None, "memory": 0},  # unknown is not bad
        {"mpirun": "/usr/bin/mpirun"},
        {"nvidia_devices": 1, "tensorflow_cuda": True, "gpus": ("NVIDIA T4",)},
        {"tensorflow_version": "2.16.2"},
        {"keras_backend": ""},
    ],
)
def test_healthy_machines_have_no_findings(change: dict[str, Any]) -> None:
    assert find_problems(Facts(**change), [Trial("tf", 0.02, 8e8, "CPU")]) == []


def test_failing_tf_backend_keeps_from_training() -> None:
    (finding,) = find_problems(Facts(), [Trial("tf", error="no result within 90 s")])
    assert finding.severity is ERROR
    assert "no result within 90 s" in finding.what


def test_horovod_that_loads_but_fails_is_an_error_because_auto_takes_it() -> None:
    good = Trial("tf", 0.02, 8e8, "CPU")
    (finding,) = find_problems(Facts(), [good, Trial("horovod", error="rank 1 ended")])
    assert finding.severity is ERROR
    assert "--backend tf" in finding.fix


def test_failing_mpirun_is_a_warning_because_tfdist_run_needs_none() -> None:
    (finding,) = find_problems(Facts(), [Trial("horovod+mpi", error="worlds of size [1, 1]")])
    assert finding.severity is WARNING


def test_worst_comes_first() -> None:
    facts = dataclasses.replace(Facts(), horovod=None, open_files=10, legacy_keras=True)
    assert [finding.severity for finding in find_problems(facts, [])] == [ERROR, WARNING, NOTE]
