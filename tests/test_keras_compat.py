"""The faults of Keras that `keras_compat` mends: a test here fails once Keras mends one itself.

Then the patch can go, for that version of Keras and later.
"""

from __future__ import annotations

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
