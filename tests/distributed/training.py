"""What each rank runs in `test_training.py`: the ways in which users train, one function each.

A function returns plain data; where it is compared with one process, it runs in a world of one rank as well.
"""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tests.distributed import bodies, models


def _dense(optimizer: Any, **options: Any) -> Any:
    import keras

    keras.utils.set_random_seed(11)
    model = models.dense()
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), **options)
    return model


def _shares() -> tuple[np.ndarray, np.ndarray, int]:
    import tfdist

    x, y = models.data("dense")
    return bodies.share(x), bodies.share(y), models.GLOBAL_BATCH // tfdist.size()


def train_on_batch() -> dict[str, Any]:
    """A model without input shape, built by its first batch."""
    import keras

    keras.utils.set_random_seed(11)
    model = keras.Sequential([keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(3)])
    model.compile(
        bodies.wrap(keras.optimizers.Adam(0.01)), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    x, y, batch = _shares()
    before: list[np.ndarray] = []
    for start in range(0, len(x), batch):
        model.train_on_batch(x[start : start + batch], y[start : start + batch])
        before = before or [np.zeros_like(weight) for weight in model.get_weights()]
    return bodies.outcome(model, before)


def custom_loop(kind: str) -> dict[str, Any]:
    """`apply`, `apply_gradients` or a distributed tape, in a tf.function or eagerly."""
    import keras
    import tensorflow as tf

    import tfdist

    keras.utils.set_random_seed(11)
    model = models.dense()
    inner = keras.optimizers.AdamW(0.01, global_clipnorm=0.05)
    optimizer = inner if kind.startswith("tape") else bodies.wrap(inner)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        if kind.startswith("tape"):
            tape = tfdist.DistributedGradientTape(tape)
        gradients = tape.gradient(value, model.trainable_variables)
        if kind.startswith("apply_gradients"):
            optimizer.apply_gradients(list(zip(gradients, model.trainable_variables, strict=True)))
        else:
            optimizer.apply(gradients, model.trainable_variables)

    run = step if kind.endswith("eager") else tf.function(step)
    x, y, batch = _shares()
    before = bodies.weights_of(model)
    for start in range(0, len(x), batch):
        run(tf.constant(x[start : start + batch]), tf.constant(y[start : start + batch]))
    return bodies.outcome(model, before, inner)


def all_together(order: str) -> dict[str, Any]:
    """float16, loss scaling, clipping by global norm, moving averages and accumulation, in one `fit()`."""
    import keras

    import tfdist

    keras.config.set_dtype_policy("mixed_float16")
    try:
        inner = keras.optimizers.AdamW(0.01, global_clipnorm=0.2, use_ema=True, ema_momentum=0.9)
        if order == "loss scale outside":
            scaled = keras.optimizers.LossScaleOptimizer(_accumulating(inner), initial_scale=64.0)
        else:
            scaled = _accumulating(keras.optimizers.LossScaleOptimizer(inner, initial_scale=64.0))
        model = _dense(scaled, auto_scale_loss=False)
    finally:
        keras.config.set_dtype_policy("float32")
    x, y = models.data("dense", steps=8)
    before = bodies.weights_of(model)
    size = tfdist.size()
    # Two passes of each rank make one step: one process takes their rows at once.
    batch = 2 * models.GLOBAL_BATCH if size == 1 else models.GLOBAL_BATCH // size
    x, y = (x, y) if size == 1 else (bodies.share(x), bodies.share(y))
    model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0)
    return bodies.outcome(model, before, inner)


def _accumulating(optimizer: Any) -> Any:
    return bodies.wrap(optimizer, backward_passes_per_step=2)


def in_a_process_set(backwards: bool | None) -> dict[str, Any]:
    """Ranks 0 and 2 train on the data, ranks 1 and 3 on the same data with the labels reversed.

    Args:
        backwards: whether the only rank of a reference run takes reversed labels.
    """
    import keras

    import tfdist

    x, y = models.data("dense")
    rank, parts, process_set = 0, 1, None
    if tfdist.size() > 1:
        sets = [tfdist.add_process_set([0, 2]), tfdist.add_process_set([1, 3])]
        backwards = tfdist.rank() % 2 == 1
        process_set = sets[int(backwards)]
        rank, parts = process_set.rank(), process_set.size()
    if backwards:
        y = y[::-1].copy()
    model = _dense(bodies.wrap(keras.optimizers.Adam(0.01), process_set=process_set))
    before = bodies.weights_of(model)
    share = [models.part(values, rank, parts, models.GLOBAL_BATCH) for values in (x, y)]
    model.fit(*share, batch_size=models.GLOBAL_BATCH // parts, epochs=2, shuffle=False, verbose=0)
    if tfdist.size() > 1:
        for each in sets:
            tfdist.remove_process_set(each)
    return bodies.outcome(model, before)


def overflow_on_one_rank(order: str) -> dict[str, Any]:
    """One rank's gradients overflow in the second step; every rank must skip it and halve the scale."""
    import keras
    import tensorflow as tf

    import tfdist

    weight = tf.Variable([1.0, 2.0])
    inner = keras.optimizers.SGD(0.5)
    if order == "loss scale outside":
        optimizer = keras.optimizers.LossScaleOptimizer(tfdist.DistributedOptimizer(inner), initial_scale=8.0)
        scale = optimizer
    else:
        scale = keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0)
        optimizer = tfdist.DistributedOptimizer(scale)

    @tf.function
    def step(bad: Any) -> None:
        gradient = tf.constant([1.0, -1.0]) * (tf.cast(tfdist.rank(), tf.float32) + 1.0)
        gradient = tf.where(bad, gradient * np.inf, gradient)
        optimizer.apply([optimizer.scale_loss(gradient)], [weight])

    history = []
    for number in range(3):
        step(tf.constant(number == 1 and tfdist.rank() == tfdist.size() - 1))
        history.append((weight.numpy().tolist(), float(scale.dynamic_scale), int(inner.iterations)))
    return {"history": history}


def structures() -> dict[str, Any]:
    """Two inputs, two outputs, a shared layer, a frozen one, an unused one, and a regularizer."""
    import keras

    import tfdist

    keras.utils.set_random_seed(11)
    a, b = keras.Input((6,), name="a"), keras.Input((6,), name="b")
    shared = keras.layers.Dense(5, activation="tanh", kernel_regularizer="l2")
    frozen = keras.layers.Dense(5)
    frozen.trainable = False
    merged = shared(a) + shared(b) + frozen(b)
    outputs = {"first": keras.layers.Dense(1, name="first")(merged), "second": keras.layers.Dense(2)(merged)}
    outputs["second"] = keras.layers.Identity(name="second")(outputs["second"])
    model = keras.Model({"a": a, "b": b}, outputs)
    model.compile(
        bodies.wrap(keras.optimizers.Adam(0.01)),
        {"first": "mse", "second": "mae"},
        loss_weights={"first": 1.0, "second": 0.5},
    )
    x, _ = models.data("dense")
    targets = {"first": x[:, :1] ** 2, "second": x[:, 1:3]}
    before = bodies.weights_of(model)
    model.fit(
        {"a": bodies.share(x), "b": bodies.share(x[::-1].copy())},
        {name: bodies.share(value) for name, value in targets.items()},
        batch_size=models.GLOBAL_BATCH // tfdist.size(),
        shuffle=False,
        verbose=0,
    )
    result = bodies.outcome(model, before)
    result["moved"] = [max(result["moved"])]
    return result


def two_optimizers(order: str) -> dict[str, Any]:
    """A GAN-like model with two optimizers in its train_step; ranks may trace them in another order."""
    import keras
    import tensorflow as tf

    import tfdist

    class Two(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = keras.layers.Dense(3), keras.layers.Dense(3)

        def call(self, inputs: Any) -> Any:
            return self.left(inputs) + self.right(inputs)

        def train_step(self, data: Any) -> Any:
            x, y = data
            for layer, optimizer in ((self.left, first), (self.right, second)):
                with tf.GradientTape() as tape:
                    loss = loss_of(y, self(x, training=True))
                optimizer.apply(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables)
            return {"loss": loss}

    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    keras.utils.set_random_seed(11)
    model = Two()
    model(np.zeros((1, 6), "float32"))
    first, second = keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.1)
    if order == "swapped" and tfdist.rank() == 1:
        second = bodies.wrap(second)
        first = bodies.wrap(first)
    else:
        first = bodies.wrap(first)
        second = bodies.wrap(second)
    model.compile(first)
    x, y, batch = _shares()
    before = bodies.weights_of(model)
    model.fit(x, y, batch_size=batch, shuffle=False, verbose=0)
    return bodies.outcome(model, before, first)


def ragged_last_batch() -> dict[str, Any]:
    """The last batch is smaller: the step is traced again, and on rank 1 later than on the others."""
    import keras
    import tensorflow as tf

    import tfdist

    model = _dense(bodies.wrap(keras.optimizers.Adam(0.01)))
    x, y = models.data("dense", steps=3)
    keep = 2 * models.GLOBAL_BATCH + 4
    batches = [slice(0, 16), slice(16, 32), slice(32, keep)]
    before = bodies.weights_of(model)
    size, rank = tfdist.size(), tfdist.rank()
    parts = [(x[s][rank::size], y[s][rank::size]) for s in batches]

    def generate() -> Any:
        yield from parts

    data = tf.data.Dataset.from_generator(
        generate,
        output_signature=(tf.TensorSpec((None, 6), tf.float32), tf.TensorSpec((None,), tf.int64)),
    )
    if size == 1:  # Keras counts a step too much at the end of data of unknown length
        data = data.apply(tf.data.experimental.assert_cardinality(len(parts)))
    model.fit(data, epochs=2, verbose=0)
    return bodies.outcome(model, before)


def xla(kind: str) -> dict[str, Any]:
    """Asked for by the user, chosen by Keras on a machine with an accelerator, or beside an own train_step."""
    import keras

    import tfdist
    from tfdist import fit_hook, keras_compat

    if tfdist.size() > 1:  # a hook says everything once; earlier tests in this world may have heard it
        keras_compat.uninstall()
        keras_compat.install(fit_hook.FitHook())
    printed = io.StringIO()
    optimizer = bodies.wrap(keras.optimizers.Adam(0.01))
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(printed))
        if kind == "auto":
            resolve = keras.Model._resolve_auto_jit_compile
            keras.Model._resolve_auto_jit_compile = lambda self: True
            stack.callback(setattr, keras.Model, "_resolve_auto_jit_compile", resolve)
            model = _dense(optimizer)
            assert model.jit_compile
        elif kind == "own train_step":

            class Own(keras.Model):
                def __init__(self) -> None:
                    super().__init__()
                    self.body = models.dense()

                def call(self, inputs: Any, training: bool = False) -> Any:
                    return self.body(inputs)

                def train_step(self, data: Any) -> Any:
                    import tensorflow as tf

                    x, y = data
                    with tf.GradientTape() as tape:
                        loss = self.compute_loss(x, y, self(x, training=True))
                    gradients = tape.gradient(loss, self.trainable_variables)
                    self.optimizer.apply(gradients, self.trainable_variables)
                    return {"loss": loss}

            keras.utils.set_random_seed(11)
            model = Own()
            model(np.zeros((1, 6), "float32"))
            model.compile(
                optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=True
            )
        else:
            model = _dense(optimizer, jit_compile=True, metrics=["accuracy"])
        x, y, batch = _shares()
        start = bodies.weights_of(model)
        model.fit(x, y, batch_size=batch, shuffle=False, verbose=0, epochs=2)
        model.compile(
            optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=True
        )
        model.fit(x, y, batch_size=batch, shuffle=False, verbose=0)
    result = bodies.outcome(model, start)
    result["printed"] = printed.getvalue()
    result["jit_compile"] = bool(model.jit_compile)
    result["rank"] = tfdist.rank()
    return result


def wrapped_after_build_and_resumed() -> dict[str, Any]:
    """Train, save on rank 0, load and wrap everywhere, go on: as one process that never stopped."""
    import keras

    import tfdist

    x, y, batch = _shares()
    model = _dense(bodies.wrap(keras.optimizers.Adam(0.01)))
    before = bodies.weights_of(model)
    model.fit(x, y, batch_size=batch, shuffle=False, verbose=0)
    folder = tfdist.broadcast_object(tempfile.mkdtemp() if tfdist.rank() == 0 else None)
    path = Path(folder) / "model.keras"
    if tfdist.rank() == 0:
        model.save(path)
    tfdist.barrier()
    model = tfdist.load_model(path) if tfdist.size() > 1 else keras.models.load_model(path)
    model.fit(x, y, batch_size=batch, shuffle=False, verbose=0)
    return bodies.outcome(model, before, getattr(model.optimizer, "inner_optimizer", model.optimizer))


def refusals() -> dict[str, str]:
    """What is refused, with the messages."""
    import keras
    import tensorflow as tf

    import tfdist

    said: dict[str, str] = {}
    x, y, batch = _shares()

    def refused(name: str, action: Any) -> None:
        try:
            action()
        except tfdist.TfdistError as error:
            said[name] = f"{type(error).__name__}: {error}"
        else:
            said[name] = "not refused"

    plain = _dense(keras.optimizers.Adam())
    refused("plain", lambda: plain.fit(x, y, batch_size=batch, verbose=0))
    path = Path(tempfile.mkdtemp()) / "model.keras"
    wrapped = _dense(tfdist.DistributedOptimizer(keras.optimizers.Adam()))
    wrapped.fit(x, y, batch_size=batch, verbose=0)
    wrapped.save(path)
    refused("loaded", lambda: keras.models.load_model(path).fit(x, y, batch_size=batch, verbose=0))

    class Bypass(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.body = keras.layers.Dense(3)

        def call(self, inputs: Any) -> Any:
            return self.body(inputs)

        def train_step(self, data: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self(data[0])))
            for gradient, variable in zip(
                tape.gradient(loss, self.trainable_variables), self.trainable_variables, strict=True
            ):
                variable.assign_sub(0.1 * gradient)
            return {"loss": loss}

    bypass = Bypass()
    bypass.compile(tfdist.DistributedOptimizer(keras.optimizers.Adam()))
    refused("bypass", lambda: bypass.fit(x, y, batch_size=batch, verbose=0))
    with tfdist.local():
        history = plain.fit(x, y, batch_size=batch, verbose=0)
    said["local"] = f"{len(history.epoch)} epoch"
    return said


def alone_for_a_while(path: str) -> dict[str, Any]:
    """Train functions that were made for another purpose: before `init`, in `local`, in a world that has ended."""
    import keras

    import tfdist

    x, y, batch = _shares()
    said: dict[str, Any] = {}
    plain = _dense(keras.optimizers.Adam(0.01))
    with tfdist.local():
        plain.fit(x, y, batch_size=batch, verbose=0)
    try:
        plain.fit(x, y, batch_size=batch, verbose=0)
        said["after local"] = "trained"
    except tfdist.OutOfSyncError as error:
        said["after local"] = str(error)
    joint = _dense(tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    joint.fit(x, y, batch_size=batch, verbose=0)
    said["together"] = bodies.digest(bodies.weights_of(joint))
    tfdist.shutdown()
    inner = joint.optimizer.inner_optimizer
    joint.compile(inner, joint.loss)
    joint.fit(x, y, batch_size=batch, verbose=0)
    said["alone"] = bodies.digest(bodies.weights_of(joint))
    plain.fit(x, y, batch_size=batch, verbose=0)
    os.environ["TFDIST_RENDEZVOUS"] = f"file://{path}"
    tfdist.init()
    try:
        plain.fit(x, y, batch_size=batch, verbose=0)
        said["before init"] = "trained"
    except tfdist.OutOfSyncError as error:
        said["before init"] = str(error)
    return said


def hook_is_undone() -> list[bool]:
    """The patches are there in a world and gone after shutdown, which a fresh world tests last."""
    import keras

    import tfdist

    def patched() -> bool:
        return "train_step" in keras.Model.__dict__ or "make_train_function" in keras.Model.__dict__

    before = patched()
    tfdist.shutdown()
    return [before, patched(), keras.optimizers.LossScaleOptimizer.apply.__module__.startswith("tfdist")]
