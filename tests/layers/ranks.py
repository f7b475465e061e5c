"""What each rank runs in `test_sync_batch_norm.py`; in a world of one rank, on the union of the ranks' batches.

There plain BatchNormalization is the reference, so models are made with it, and become synchronized on several
ranks only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.distributed import bodies

CHANNELS = 3


def _keras_for(world_size: int, model: Any, process_set: Any = None) -> Any:
    from tfdist.layers import sync_batch_norm

    return sync_batch_norm(model, process_set) if world_size > 1 else model


# One layer, called by hand.

LAYER_CASES = {
    "plain": {},
    "eager": {},
    "masked": {},
    "masked channels first": {"axis": 1},
    "channels first": {"axis": 1},
    "far from zero": {},
    "float64": {"dtype": "float64"},
    "float16": {"dtype": "float16"},
    "bfloat16": {"dtype": "bfloat16"},
    "renormalized": {"renorm": True, "renorm_clipping": {"rmax": 1.5, "dmax": 0.5}},
    "called twice": {},
    "no scale, no centre": {"scale": False, "center": False},
}


def layer_data(case: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs `[14, 4, 3]`, weights of the loss, and a mask that leaves one sample nothing."""
    random = np.random.default_rng(5)
    x = random.standard_normal((14, 4, CHANNELS)) * [1.0, 3.0, 0.1] + [0.0, 5.0, -1.0]
    if case == "far from zero":
        x += 1000.0
    weights = random.standard_normal(x.shape)
    mask = random.random(x.shape[:2]) < 0.6
    mask[0] = False
    if "first" in case:
        x, weights = x.transpose(0, 2, 1), weights.transpose(0, 2, 1)
        mask = random.random(x.shape[:2]) < 0.6
    return x, weights, mask


def rows_of(rank: int, size: int) -> slice:
    """Unequal shares of 14 rows; with 4 ranks the third has none."""
    bounds = {1: [0, 14], 2: [0, 5, 14], 4: [0, 1, 6, 6, 14]}[size]
    return slice(bounds[rank], bounds[rank + 1])


def one_layer(case: str) -> dict[str, np.ndarray]:
    """Outputs, gradients of a summed loss and moving statistics of two training steps."""
    import keras
    import tensorflow as tf

    import tfdist

    config = dict(LAYER_CASES[case])
    x, loss_weights, mask = layer_data(case)
    if tfdist.size() > 1:
        layer = tfdist.layers.SyncBatchNormalization(momentum=0.7, **config)
    else:
        layer = keras.layers.BatchNormalization(momentum=0.7, **config)
    dtype = config.get("dtype", "float32")
    layer.build(x.shape)
    rows = rows_of(tfdist.rank(), tfdist.size())
    own = tf.constant(x[rows], dtype)
    own_weights = tf.constant(loss_weights[rows], "float32")
    own_mask = tf.constant(mask[rows]) if "masked" in case else None

    def step(values: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(values)
            outputs = layer(values, training=True, mask=own_mask)
            if case == "called twice":
                outputs = layer(outputs**2, training=True)
            loss = tf.reduce_sum(tf.cast(outputs, tf.float32) * own_weights)
        return outputs, tape.gradient(loss, [values, *layer.trainable_variables])

    run = step if case == "eager" else tf.function(step)
    run(own * 0.5)
    outputs, (of_inputs, *of_weights) = run(own)
    if tfdist.size() > 1 and of_weights:
        of_weights = tfdist.grouped_allreduce(of_weights, op=tfdist.Sum, name="of weights")
    result = {"outputs": outputs, "of inputs": of_inputs}
    result |= {f"of weight {i}": value for i, value in enumerate(of_weights)}
    result |= {f"moving {i}": variable.value for i, variable in enumerate(layer.non_trainable_variables)}
    return {
        name: np.asarray(tf.cast(value, "float64" if dtype == "float64" else "float32"))
        for name, value in result.items()
    }


def all_layer_cases() -> dict[str, dict[str, np.ndarray]]:
    return {case: one_layer(case) for case in LAYER_CASES if _runs_here(case)}


def _runs_here(case: str) -> bool:
    """Keras < 3.15 miscounts masked values where channels come first; older ones don't renormalize."""
    import inspect

    import keras

    if case == "masked channels first":
        return tuple(map(int, keras.__version__.split(".")[:2])) >= (3, 15)
    return case != "renormalized" or "renorm" in inspect.signature(keras.layers.BatchNormalization).parameters


# Models in fit().


def image_model() -> Any:
    """Two normalizations in a row of blocks, one of them called twice, and a nested model with a third."""
    import keras
    from keras import layers

    keras.utils.set_random_seed(4)
    inner = keras.Sequential(
        [
            keras.Input((6, 6, 4)),
            layers.Conv2D(4, 3, use_bias=False),
            layers.BatchNormalization(momentum=0.8),
            layers.Activation("tanh"),
        ]
    )
    images = keras.Input((8, 8, 2))
    hidden = layers.Conv2D(4, 3, use_bias=False)(images)
    twice = layers.BatchNormalization(momentum=0.9)
    hidden = keras.ops.tanh(twice(hidden))
    hidden = twice(inner(hidden))
    hidden = layers.GlobalAveragePooling2D()(hidden)
    hidden = layers.BatchNormalization()(layers.Dense(4, use_bias=False)(hidden))
    return keras.Model(images, layers.Dense(3)(hidden))


def small_model() -> Any:
    """Quick to trace, for what doesn't depend on the shape of the model."""
    import keras
    from keras import layers

    keras.utils.set_random_seed(4)
    return keras.Sequential(
        [
            keras.Input((8, 8, 2)),
            layers.Flatten(),
            layers.Dense(6, use_bias=False),
            layers.BatchNormalization(momentum=0.8),
            layers.Activation("tanh"),
            layers.Dense(5, use_bias=False),
            layers.BatchNormalization(momentum=0.8),
            layers.Dense(3),
        ]
    )


def image_data(rows: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(9)
    x = random.standard_normal((rows, 8, 8, 2)).astype("float32") + random.standard_normal((rows, 1, 1, 1))
    return x.astype("float32"), random.integers(0, 3, rows)


def _compiled(model: Any, optimizer: Any, **options: Any) -> Any:
    import keras

    model.compile(
        optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        **options,
    )
    return model


def _made(
    make: Callable[[], Any],
    optimizer: str = "SGD",
    policy: str | None = None,
    process_set: Any = None,
    **options: Any,
) -> Any:
    import keras

    import tfdist

    if policy:
        keras.config.set_dtype_policy(policy)
    try:
        model = _keras_for(tfdist.size(), make(), process_set)
    finally:
        keras.config.set_dtype_policy("float32")
    inner = bodies.optimizer_of(optimizer, learning_rate=0.05 if optimizer == "SGD" else 0.01)
    return _compiled(model, bodies.wrap(inner, process_set=process_set), **options)


def _outcome(model: Any, before: list[np.ndarray], history: Any = None) -> dict[str, Any]:
    result = bodies.outcome(model, before, getattr(model.optimizer, "inner_optimizer", model.optimizer))
    result["logs"] = {} if history is None else history.history
    return result


def fit_images(optimizer: str, policy: str | None = None) -> dict[str, Any]:
    """Six steps; then rank 0 alone evaluates and predicts, which must not need the others."""
    import tfdist

    model = _made(image_model if policy is None else small_model, optimizer, policy)
    before = bodies.weights_of(model)
    x, y = image_data(3 * 16)
    batch = 16 // tfdist.size()
    model.fit(bodies.share(x), bodies.share(y), batch_size=batch, shuffle=False, epochs=2, verbose=0)
    result = _outcome(model, before)
    if tfdist.rank() == 0:
        result["evaluated"] = model.evaluate(x[:16], y[:16], verbose=0)
        result["predicted"] = model.predict(x[:16], verbose=0)
    return result


PLANS = {
    "fewer batches": [[range(6), range(6, 12), range(12, 18)], [range(20, 24)]],
    "other sizes": [[range(3), range(3, 6)], [range(6, 16), range(16, 18)]],
    "a short one, and none": [[range(6), range(6, 7)], [range(7, 11), range(11, 15), range(15, 20)]],
}


MODES: dict[str, dict[str, Any]] = {
    "known length": {},
    "unknown length": {},
    "eager": {"run_eagerly": True},
    "several steps per execution": {"steps_per_execution": 2},
}


def fit_uneven(plan: str, mode: str) -> dict[str, Any]:
    """Each rank has batches of its own; one process has their union in each step."""
    import tensorflow as tf

    import tfdist

    x, y = image_data(24)
    batches = [list(map(list, own)) for own in PLANS[plan]]
    if tfdist.size() == 1:
        steps = max(map(len, batches))
        chosen = [[i for own in batches if step < len(own) for i in own[step]] for step in range(steps)]
    else:
        chosen = batches[tfdist.rank()]

    def generate() -> Any:
        for rows in chosen:
            yield x[rows], y[rows]

    data = tf.data.Dataset.from_generator(
        generate,
        output_signature=(tf.TensorSpec([None, 8, 8, 2], tf.float32), tf.TensorSpec([None], tf.int64)),
    )
    if mode != "unknown length" or tfdist.size() == 1:
        data = data.apply(tf.data.experimental.assert_cardinality(len(chosen)))
    model = _made(small_model, **(MODES[mode] if tfdist.size() > 1 else {}))
    before = bodies.weights_of(model)
    history = model.fit(data, epochs=2, verbose=0)
    return _outcome(model, before, history)


def fit_until_one_rank_stops() -> dict[str, Any]:
    """The last rank stops training after its second batch: the step that carries the news counts for nothing."""
    import keras

    import tfdist

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 1 and tfdist.rank() == tfdist.size() - 1:
                self.model.stop_training = True

    model = _made(small_model)
    before = bodies.weights_of(model)
    steps = 5 if tfdist.size() > 1 else 2
    x, y = (values[: steps * 16] for values in image_data(5 * 16))
    batch = 16 // tfdist.size()
    callbacks = [Stop()] if tfdist.size() > 1 else []
    model.fit(
        bodies.share(x), bodies.share(y), batch_size=batch, shuffle=False, verbose=0, callbacks=callbacks
    )
    return _outcome(model, before)


def fit_in_a_process_set(backwards: bool) -> dict[str, Any]:
    """Ranks 0 and 2 train on the data, ranks 1 and 3 on the same with the labels reversed."""
    import tfdist
    from tests.distributed import models

    rank, parts, process_set = 0, 1, None
    sets: list[Any] = []
    if tfdist.size() > 1:
        sets = [tfdist.add_process_set([0, 2]), tfdist.add_process_set([1, 3])]
        backwards = tfdist.rank() % 2 == 1
        process_set = sets[int(backwards)]
        rank, parts = process_set.rank(), process_set.size()
    x, y = image_data(3 * 16)
    if backwards:
        y = y[::-1].copy()
    model = _made(small_model, process_set=process_set)
    before = bodies.weights_of(model)
    share = [models.part(values, rank, parts) for values in (x, y)]
    model.fit(*share, batch_size=16 // parts, shuffle=False, verbose=0)
    result = _outcome(model, before)
    for each in sets:
        tfdist.remove_process_set(each)
    return result


def fit_frozen() -> list[Any]:
    """A frozen layer normalizes with its moving statistics, and sends nothing: rank 0 calls it alone."""
    import tensorflow as tf

    import tfdist

    layer = tfdist.layers.SyncBatchNormalization(trainable=False)
    layer.build((None, CHANNELS))
    x = tf.ones([4, CHANNELS]) * 3.0
    outputs = layer(x, training=True) if tfdist.rank() == 0 else layer(x, training=False)
    return [np.asarray(outputs), np.asarray(layer.moving_mean)]


def xla() -> dict[str, Any]:
    """Whether Keras compiles models with XLA, and what a user hears who does it by hand."""
    import keras
    import tensorflow as tf

    import tfdist

    layer = tfdist.layers.SyncBatchNormalization()
    layer.build((None, CHANNELS))
    said = ""
    try:
        tf.function(lambda x: layer(x, training=True), jit_compile=True)(tf.ones([4, CHANNELS]))
    except tfdist.CollectiveError as error:
        said = str(error)
    plain = keras.Sequential([keras.Input((CHANNELS,)), keras.layers.BatchNormalization()])
    plain.compile(jit_compile=True)
    model = keras.Sequential([keras.Input((CHANNELS,)), layer])
    model.compile(jit_compile=True)
    return {"synchronized": model.jit_compile, "plain": plain.jit_compile, "said": said}


def fit_with_xla() -> dict[str, Any]:
    """Converted after a compile that asked for XLA."""
    import keras

    import tfdist

    model = small_model()
    _compiled(model, bodies.wrap(keras.optimizers.SGD(0.05)), jit_compile=tfdist.size() > 1)
    _keras_for(tfdist.size(), model)
    before = bodies.weights_of(model)
    x, y = image_data(2 * 16)
    batch = 16 // tfdist.size()
    model.fit(bodies.share(x), bodies.share(y), batch_size=batch, shuffle=False, verbose=0)
    return _outcome(model, before)


def fit_alone() -> list[np.ndarray]:
    """Rank 0 trains in `tfdist.local()`; nobody answers it."""
    import keras

    import tfdist

    if tfdist.rank() > 0:
        return []
    x, y = image_data(16)
    model = _keras_for(tfdist.size(), small_model())
    with tfdist.local():
        _compiled(model, keras.optimizers.SGD(0.05)).fit(x, y, batch_size=8, shuffle=False, verbose=0)
    return bodies.weights_of(model)
