"""The faults of Keras that `keras_compat` mends: a test here fails once Keras mends one itself.

Then the patch can go, for that version of Keras and later.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests import replica_faults
from tests.distributed import models
from tests.worlds import World, on


def fit_with_xla_and_no_hook() -> str:
    """Plain Keras compiles the whole step, collective included."""
    import keras

    import tfdist
    from tfdist import fit_hook, keras_compat

    keras_compat.uninstall()
    try:
        model = models.dense()
        model.compile(
            tfdist.DistributedOptimizer(keras.optimizers.SGD()),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile=True,
        )
        x, y = models.data("dense")
        model.fit(x, y, verbose=0)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        keras_compat.install(fit_hook.FitHook())
    return "trained"


@on(("horovod", 2))
def test_keras_still_compiles_the_collective_into_the_step(world: World) -> None:
    for said in world.call(fit_with_xla_and_no_hook):
        assert said != "trained", "Keras keeps XLA out of the update itself now: drop patches 1 and 2"
        assert "XLA" in said or "jit_compile" in said or "unsupported" in said, said


def traces_of_the_train_step() -> int:
    import keras

    traces = []

    class Counting(keras.Sequential):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            traces.append(1)
            return super().train_step(data)

    import tfdist

    model = Counting([keras.Input((6,)), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer: Any = keras.optimizers.Adam()
    if tfdist.size() > 1:
        optimizer = tfdist.DistributedOptimizer(optimizer)
    model.compile(optimizer, loss, metrics=["accuracy"])
    x, y = models.data("dense")
    broadcast = tfdist.callbacks.BroadcastGlobalVariablesCallback()
    model.fit(x, y, verbose=0, callbacks=[broadcast] if tfdist.size() > 1 else [])
    return len(traces)


@on(("tf", 2), ("single", 1))
def test_keras_still_traces_the_train_step_twice_and_a_world_only_once(world: World) -> None:
    assert set(world.call(traces_of_the_train_step)) == {1 if world.size > 1 else 2}


def test_keras_still_applies_inside_a_cond_of_local_finiteness() -> None:
    import keras
    import tensorflow as tf

    graphs: list[str] = []

    class Recording(keras.optimizers.SGD):
        def apply(self, grads: Any, trainable_variables: Any = None) -> None:
            graphs.append(tf.compat.v1.get_default_graph().name)
            super().apply(grads, trainable_variables)

    weight = tf.Variable([1.0])
    optimizer = keras.optimizers.LossScaleOptimizer(Recording(1.0))
    tf.function(lambda gradient: optimizer.apply([gradient], [weight]))(tf.constant([np.inf]))
    assert float(weight[0]) == 1.0
    assert any("cond" in name for name in graphs), (
        f"{graphs}: no cond around the inner apply any more: drop patch 3"
    )


def test_install_twice_and_uninstall() -> None:
    import keras

    from tfdist import keras_compat

    class Quiet:
        def check(self, model: Any) -> None: ...

        def before_first_step(self, model: Any, spec: Any) -> None: ...

        def step(self, model: Any, run: Any) -> Any:
            return run()

        def tell(self, message: str) -> None: ...

    def methods() -> tuple[Any, ...]:
        model, scale = keras.Model, keras.optimizers.LossScaleOptimizer
        return model.make_train_function, model.train_step, scale.apply

    before = methods()
    keras_compat.install(Quiet())
    patched = methods()
    keras_compat.install(Quiet())
    assert methods() == patched
    assert not set(patched) & set(before)
    keras_compat.uninstall()
    keras_compat.uninstall()
    assert methods() == before


def test_capture_records_instead_of_updating() -> None:
    import keras
    import tensorflow as tf

    import tfdist
    from tfdist.keras_compat import capture_updates

    tfdist.init()
    try:
        weight = tf.Variable([1.0])
        optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(1.0))
        with capture_updates() as updates:
            optimizer.apply([tf.constant([0.5])], [weight])
        assert float(weight[0]) == 1.0
        ((captured, gradients, variables),) = updates
        captured.apply(gradients, variables)
        assert float(weight[0]) == 0.5
    finally:
        tfdist.shutdown()


@pytest.mark.parametrize("name", ["make_train_function", "train_step", "jit_compile", "_symbolic_build"])
def test_places_that_are_patched_or_used_exist(name: str) -> None:
    import keras

    assert hasattr(keras.Model, name)


def test_faults_of_keras_on_several_devices(fresh_world: Callable[..., World]) -> None:
    (found,) = fresh_world("single", 1, strategy="mirrored(devices=2)").call(replica_faults.on_devices)
    assert found["ragged"] > 1e-4, "Keras weighs replicas by their rows: drop `replica_weights`"
    assert found["statistics"] > 1e-4, "Keras combines moving statistics: drop `note_assignment`"
    assert "merge_call" in found["accumulation"], "Keras accumulates under strategies: see `one_device`"
    assert found["number"].startswith("TypeError"), "int(variable) works under strategies: drop `as_number`"
    assert found["seeds"], "Keras draws differently on replicas: drop `seed_by_replica`"
    assert found["added"] == 4.0, "assign_add adds once per replica: drop `atomic_assign`"


def test_faults_of_keras_between_workers(fresh_world: Callable[..., World]) -> None:
    world = fresh_world("tf", 2, strategy="multi_worker_mirrored(devices=2)")
    for found in world.call(replica_faults.between_workers):
        assert found["built"] != "nothing", "Keras builds between workers: drop `build_from_spec`"
        assert found["reduced"] != "nothing", (
            "Keras reduces scalars between workers: drop `reduce_logs_locally`"
        )


def test_keras_still_adds_by_reading_and_writing() -> None:
    """Two workers that add at once lose one: what `kept_back` keeps from happening."""
    import keras

    variable = keras.Variable(1.0)
    written: list[float] = []
    variable._direct_assign = lambda value: written.append(float(value))
    variable.assign_add(2.0)
    assert written == [3.0], "assign_add adds in one operation now: metrics need not be kept back"


_PARAMETER_SERVERS = """
import socket, sys
import keras, numpy as np, tensorflow as tf
reserved = [socket.socket() for _ in range(3)]
for each in reserved:
    each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    each.bind(("127.0.0.1", 0))
places = [f"127.0.0.1:{each.getsockname()[1]}" for each in reserved]
cluster = tf.train.ClusterSpec({"chief": places[:1], "ps": places[1:2], "worker": places[2:]})
servers = [tf.distribute.Server(cluster, job_name=job, task_index=0) for job in ("ps", "worker")]
resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
    cluster, rpc_layer="grpc", task_type="chief", task_id=0
)
strategy = tf.distribute.ParameterServerStrategy(resolver)
tf.distribute.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
for method in (model.evaluate, model.fit):
    try:
        method(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
        print(method.__name__, "works")
    except Exception as error:
        print(method.__name__, "fails")
sys.stdout.flush()
import os
os._exit(0)
"""


def test_keras_still_cannot_use_models_on_parameter_servers() -> None:
    """What `placed_models` and `scheduled_steps` mend."""
    done = subprocess.run(
        [sys.executable, "-c", _PARAMETER_SERVERS],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.split("\n")[:2] == ["evaluate fails", "fit fails"], done.stdout + done.stderr[-3000:]


@pytest.mark.parametrize(
    "name",
    ["_maybe_symbolic_build", "distribute_strategy", "_distribute_strategy", "compile", "_compile_metrics"],
)
def test_places_that_models_on_servers_need_exist(name: str) -> None:
    import keras

    assert hasattr(keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)]), name)
