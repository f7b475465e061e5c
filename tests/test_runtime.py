"""`init`: arguments, environment, and what it must leave alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tfdist

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def ended() -> Any:
    yield
    tfdist.shutdown()


def test_alone_is_a_world_of_one() -> None:
    tfdist.init()
    tfdist.init()
    place = (tfdist.rank(), tfdist.size(), tfdist.local_rank(), tfdist.local_size())
    assert place == (0, 1, 0, 1)
    assert (tfdist.cross_rank(), tfdist.cross_size(), tfdist.replicas()) == (0, 1, 1)
    assert tfdist.backend() == "single"
    assert tfdist.is_initialized()
    assert not tfdist.mpi_enabled()
    assert tfdist.is_homogeneous()
    tfdist.shutdown()
    tfdist.shutdown()
    assert not tfdist.is_initialized()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"comm": [0, 1]}, "takes no communicator"),
        ({"backend": "mpi"}, "backend must be one of auto, tf, horovod, single; received 'mpi'"),
        ({"strategy": "star"}, "strategy must be one of ring, parameter_server, .*received 'star'"),
        ({"strategy": "ring(servers=2)"}, "ring takes no options; received servers"),
        ({"strategy": "parameter_server(servers=0)"}, "needs an integer k >= 1; received 0"),
        ({"strategy": "parameter_server(2)"}, r"options in parentheses.*received 'parameter_server\(2\)'"),
        ({"strategy": "parameter_server(k=2)"}, r"takes servers=k, dedicated=.*received k"),
        ({"timeout": 0}, "timeout must be a positive number of seconds"),
        ({"timeout": -3.0}, "timeout must be a positive number of seconds"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(tfdist.TfdistError, match=message):
        tfdist.init(**options)
    assert not tfdist.is_initialized()


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("TFDIST_BACKEND", "nccl", "received 'nccl' from the launcher"),
        ("TFDIST_STRATEGY", "star", "received 'star'. It came from the launcher"),
        ("TFDIST_TIMEOUT", "soon", "received 'soon'"),
        ("TFDIST_RANK", "0", "TFDIST_SIZE"),
    ],
)
def test_wrong_environment(monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(tfdist.TfdistError, match=message):
        tfdist.init()


def test_another_keras_backend_is_refused() -> None:
    code = "import keras; keras.backend.backend = lambda: 'jax'\nimport tfdist; tfdist.init()"
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert "needs its TensorFlow backend: set KERAS_BACKEND=tensorflow" in ended.stderr


SETTINGS_AFTER_INIT = """
import tfdist
tfdist.init()
import tensorflow as tf
from tensorflow.python.eager import context
assert context.context()._context_handle is None, "init() initialised TensorFlow"
import os
assert int(os.environ["TF_NUM_INTRAOP_THREADS"]) >= 1, "cores are not divided"
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_visible_devices([cpu], "CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
devices = [device.name for device in tf.config.list_logical_devices("CPU")]
assert len(devices) == 2, devices
print("sum", float(tfdist.allreduce(tf.constant(tfdist.rank() + 1.0), op=tfdist.Sum)))
"""


@pytest.mark.parametrize("backend", ["tf", "horovod"])
def test_device_settings_after_init_work(backend: str, tmp_path: Path) -> None:
    from tests.conftest import require

    require(backend)
    script = tmp_path / "script.py"
    script.write_text(SETTINGS_AFTER_INIT)
    command = [sys.executable, "-m", "tfdist", "run", "-np", "2", "--backend", backend, str(script)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("sum 3.0") == 2
