"""The wrapper as a transparent proxy: files, callbacks and errors, in a world of one rank."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def alone() -> Any:
    import tfdist

    tfdist.init()
    yield
    tfdist.shutdown()


def compiled(optimizer: Any) -> Any:
    import keras

    from tests.distributed import models

    keras.utils.set_random_seed(5)
    model = models.dense()
    model.compile(
        optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"]
    )
    return model


def trained(optimizer: Any, **options: Any) -> Any:
    from tests.distributed import models

    model = compiled(optimizer)
    x, y = models.data("dense")
    model.fit(x, y, batch_size=16, shuffle=False, verbose=0, **options)
    return model


def test_looks_like_the_inner_optimizer() -> None:
    import keras

    import tfdist

    inner = keras.optimizers.Adam(2e-3, beta_1=0.8)
    wrapped = tfdist.DistributedOptimizer(inner)
    assert isinstance(wrapped, keras.optimizers.Adam)
    assert wrapped.inner_optimizer is inner
    assert wrapped.beta_1 == 0.8
    wrapped.learning_rate = 1e-3
    assert float(inner.learning_rate) == pytest.approx(1e-3)
    assert keras.optimizers.serialize(wrapped) == keras.optimizers.serialize(inner)
    assert isinstance(tfdist.DistributedOptimizer("sgd"), keras.optimizers.SGD)


def test_saved_file_is_plain_keras(tmp_path: Path) -> None:
    """Loads in a process that cannot import tfdist, slots and iterations intact, and trains on."""
    import keras

    import tfdist

    model = trained(tfdist.DistributedOptimizer(keras.optimizers.Adam(1e-2)))
    path = tmp_path / "model.keras"
    model.save(path)
    state = [np.asarray(v) for v in model.optimizer.variables]
    np.savez(tmp_path / "state.npz", *state)
    code = (
        "import sys\n"
        "sys.modules['tfdist'] = None\n"
        "import keras, numpy as np\n"
        f"model = keras.models.load_model({str(path)!r})\n"
        f"saved = np.load({str(tmp_path / 'state.npz')!r})\n"
        "assert type(model.optimizer) is keras.optimizers.Adam\n"
        "assert int(model.optimizer.iterations) == 4\n"
        "for variable, key in zip(model.optimizer.variables, saved.files, strict=True):\n"
        "    np.testing.assert_array_equal(variable, saved[key])\n"
        "model.fit(np.ones((8, 6), 'float32'), np.zeros(8), verbose=0)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=180, cwd=tmp_path)


def test_load_model_wraps_and_keeps_slots(tmp_path: Path) -> None:
    import keras

    import tfdist

    model = trained(keras.optimizers.Adam(1e-2))
    model.save(tmp_path / "plain.keras")
    loaded = tfdist.load_model(tmp_path / "plain.keras")
    assert type(loaded.optimizer) is tfdist.DistributedOptimizer
    assert int(loaded.optimizer.iterations) == 4
    for a, b in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(a, b)


def test_load_model_without_compiled_optimizer_is_refused(tmp_path: Path) -> None:
    import tfdist
    from tests.distributed import models

    models.dense().save(tmp_path / "bare.keras")
    with pytest.raises(ValueError, match="no optimizer to wrap"):
        tfdist.load_model(tmp_path / "bare.keras")


def test_checkpoint_is_that_of_the_inner_optimizer(tmp_path: Path) -> None:
    import keras
    import tensorflow as tf

    import tfdist

    model = trained(tfdist.DistributedOptimizer(keras.optimizers.Adam(1e-2)))
    path = tf.train.Checkpoint(optimizer=model.optimizer).write(str(tmp_path / "checkpoint"))
    plain = keras.optimizers.Adam()
    plain.build(model.trainable_variables)
    tf.train.Checkpoint(optimizer=plain).read(path).assert_existing_objects_matched()
    assert int(plain.iterations) == 4


def test_training_alone_equals_plain_keras() -> None:
    import keras

    import tfdist

    expected = trained(keras.optimizers.AdamW(1e-2)).get_weights()
    actual = trained(tfdist.DistributedOptimizer(keras.optimizers.AdamW(1e-2))).get_weights()
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_stock_callbacks_see_what_they_expect(tmp_path: Path) -> None:
    import keras

    import tfdist

    optimizer = tfdist.DistributedOptimizer(keras.optimizers.Adam(1e-2, use_ema=True))
    model = trained(
        optimizer,
        epochs=3,
        callbacks=[
            keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
            keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=0, min_delta=100.0, factor=0.5),
            keras.callbacks.TensorBoard(str(tmp_path)),
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate),
            keras.callbacks.BackupAndRestore(str(tmp_path / "backup")),
        ],
    )
    assert float(optimizer.inner_optimizer.learning_rate) < 1e-2
    assert int(model.optimizer.iterations) == 12


def test_mixed_precision_wraps_once() -> None:
    import keras

    import tfdist

    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = compiled(
            tfdist.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()))
        )
    finally:
        keras.config.set_dtype_policy("float32")
    assert type(model.optimizer) is tfdist.DistributedOptimizer
    assert type(model.optimizer.inner_optimizer) is keras.optimizers.Adam


def test_wrong_use_is_refused() -> None:
    import keras
    import tensorflow as tf

    import tfdist

    adam = keras.optimizers.Adam()
    with pytest.raises(TypeError, match="pass an instance"):
        tfdist.DistributedOptimizer(keras.optimizers.Adam)
    with pytest.raises(TypeError, match="received 3 of type"):
        tfdist.DistributedOptimizer(3)
    with pytest.raises(TypeError, match="wrapping it twice"):
        tfdist.DistributedOptimizer(tfdist.DistributedOptimizer(adam))
    with pytest.raises(TypeError, match="wrapping it twice"):
        tfdist.DistributedOptimizer(
            keras.optimizers.LossScaleOptimizer(tfdist.DistributedOptimizer(keras.optimizers.Adam()))
        )
    with pytest.raises(ValueError, match=r"received <ReduceOp\.MIN"):
        tfdist.DistributedOptimizer(adam, op=tfdist.Min)
    with pytest.raises(ValueError, match="runs on the Horovod engine only"):
        tfdist.DistributedOptimizer(adam, op=tfdist.Adasum)
    with pytest.raises(ValueError, match="backward_passes_per_step must be"):
        tfdist.DistributedOptimizer(adam, backward_passes_per_step=0)
    with pytest.raises(ValueError, match="accumulated twice"):
        tfdist.DistributedOptimizer(
            keras.optimizers.Adam(gradient_accumulation_steps=2), backward_passes_per_step=2
        )
    with pytest.raises(ValueError, match="splits an average"):
        tfdist.DistributedOptimizer(adam, op=tfdist.Sum, gradient_predivide_factor=2.0)
    with pytest.raises(ValueError, match="must be > 0"):
        tfdist.DistributedOptimizer(adam, gradient_predivide_factor=0.0)
    with pytest.raises(ValueError, match="groups must be"):
        tfdist.DistributedOptimizer(adam, groups=-1)
    with pytest.raises(ValueError, match="compression must be"):
        tfdist.DistributedOptimizer(adam, compression="fp16")
    with pytest.raises(TypeError, match="wrap a tape once"):
        tfdist.DistributedGradientTape(tfdist.DistributedGradientTape(tf.GradientTape()))
    with pytest.raises(TypeError, match=r"wraps a tf\.GradientTape"):
        tfdist.DistributedGradientTape(adam)
    with pytest.raises(ValueError, match="legacy"):
        tfdist.load_model("x.keras", legacy_opts=True)


def test_before_init_is_refused() -> None:
    import keras

    import tfdist

    tfdist.shutdown()
    for use in (
        lambda: tfdist.DistributedOptimizer(keras.optimizers.Adam()),
        tfdist.rank,
        tfdist.size,
        tfdist.backend,
    ):
        with pytest.raises(tfdist.NotInitializedError, match=r"tfdist\.init\(\)"):
            use()


def test_tape_as_context_manager_and_structures() -> None:
    import tensorflow as tf

    import tfdist

    a, b = tf.Variable(2.0), tf.Variable(3.0)
    with tfdist.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = a * a * b
    gradients = tape.gradient(loss, {"a": a, "b": b})
    assert {key: float(value) for key, value in gradients.items()} == {"a": 12.0, "b": 4.0}
