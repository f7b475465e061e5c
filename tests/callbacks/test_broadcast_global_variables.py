"""`BroadcastGlobalVariablesCallback` in `fit()`: before the first step, so training equals one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.played_ranks import as_rank
from tests.worlds import World, on

ROWS, GLOBAL_BATCH = 32, 8


def data() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(ROWS, 3)).astype("float32")
    return x, np.sin(x.sum(axis=1, keepdims=True))


def make(kind: str, seed: int) -> Any:
    """A model that is built now, in its first step, or with an optimizer that has state already."""
    import keras

    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(1)]
    if kind != "deferred":
        layers.insert(0, keras.Input((3,)))
    if kind == "subclass":

        class Own(keras.Model):
            def __init__(self) -> None:
                super().__init__()
                self.inner = keras.Sequential([layer for layer in layers if isinstance(layer, keras.Layer)])

            def call(self, x: Any) -> Any:
                return self.inner(x)

        return Own()
    return keras.Sequential(layers)


def train(kind: str, root: int, first_rank_seed: int) -> dict[str, Any]:
    """Trains from rank-distinct weights; a world of one rank that starts as the root is the reference."""
    import keras

    import tfdist

    model = make(kind, first_rank_seed + tfdist.rank())
    model.compile(tfdist.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
    data_of_rank = tfdist.shard(data(), batch_size=GLOBAL_BATCH // tfdist.size(), seed=4)
    start = tfdist.callbacks.BroadcastGlobalVariablesCallback(root)
    for _ in range(2):  # a second fit() must not disturb what it continues from
        history = model.fit(data_of_rank, epochs=2, shuffle=False, verbose=0, callbacks=[start])
    return {
        "weights": model.get_weights(),
        "fingerprint": tfdist.check_in_sync(model),
        "iterations": int(model.optimizer.iterations.numpy()),
        "loss": history.history["loss"],
    }


_reference: dict[tuple[str, int], dict[str, Any]] = {}


@pytest.mark.parametrize("kind", ["built", "deferred", "subclass"])
@on(("horovod", 2), ("tf", 4), thorough=(("tf", 2),))
def test_ranks_start_as_the_root_and_train_as_one_process(world: World, kind: str) -> None:
    root = world.size - 1
    ranks = world.call(train, kind, root, 10)
    assert len({rank["fingerprint"] for rank in ranks}) == 1
    reference = one_process(kind, 10 + root)
    for rank in ranks:
        assert rank["iterations"] == reference["iterations"] == 2 * 2 * ROWS // GLOBAL_BATCH
        for ours, theirs in zip(rank["weights"], reference["weights"], strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5)


def one_process(kind: str, seed: int) -> dict[str, Any]:
    """The same training by this process alone."""
    import tfdist

    if (kind, seed) not in _reference:
        tfdist.init()
        try:
            _reference[kind, seed] = train(kind, 0, seed)
        finally:
            tfdist.shutdown()
    return _reference[kind, seed]


def continue_from_the_roots_state() -> tuple[list[np.ndarray], int, float]:
    """Rank 0 has trained before (a restored checkpoint), the others have not."""
    import keras

    import tfdist

    model = make("built", tfdist.rank())
    model.compile(tfdist.DistributedOptimizer(keras.optimizers.SGD(0.5, momentum=0.9)), "mse")
    if tfdist.rank() == 0:
        model.optimizer.build(model.trainable_variables)
        model.optimizer.iterations.assign(100)
        model.optimizer.learning_rate = 0.125
        model.optimizer.momentums[0].assign(np.ones((3, 5)))
    x, y = data()
    model.fit(
        x, y, steps_per_epoch=1, verbose=0, callbacks=[tfdist.callbacks.BroadcastGlobalVariablesCallback(0)]
    )
    tfdist.check_in_sync(model)
    return (
        model.get_weights(),
        int(model.optimizer.iterations.numpy()),
        float(model.optimizer.learning_rate.numpy()),
    )


@on(("tf", 2))
def test_optimizer_state_of_the_root_counts(world: World) -> None:
    for _, iterations, rate in world.call(continue_from_the_roots_state):
        assert (iterations, rate) == (101, 0.125)


def keep_local() -> tuple[float, float]:
    import keras

    import tfdist

    model = make("built", tfdist.rank())
    model.compile(tfdist.DistributedOptimizer(keras.optimizers.SGD(0.0)), "mse")
    kernel, bias = model.layers[0].kernel, model.layers[0].bias
    for variable in (kernel, bias):
        variable.assign(np.full(variable.shape, float(tfdist.rank())))
    start = tfdist.callbacks.BroadcastGlobalVariablesCallback(1, local_variables=[kernel])
    model.fit(*data(), verbose=0, callbacks=[start])
    return float(np.mean(kernel)), float(np.mean(bias))


@on(("tf", 2))
def test_local_variables_stay(world: World) -> None:
    assert world.call(keep_local) == [(0.0, 1.0), (1.0, 1.0)]


def masks_in_fit() -> list[bytes]:
    """Outputs of dropout in a train step, on rows that are equal on all ranks."""
    import keras
    import tensorflow as tf

    import tfdist

    seen: list[Any] = []

    class Watch(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            tf.py_function(lambda value: seen.append(value.numpy()), [x], [])
            return x

    keras.utils.set_random_seed(2)
    model = keras.Sequential(
        [
            keras.Input((40,)),
            keras.layers.Dropout(0.5),
            Watch(),
            keras.layers.Dense(1, kernel_initializer="ones"),
        ]
    )
    model.compile(tfdist.DistributedOptimizer(keras.optimizers.SGD(0.0)), "mse")
    start = tfdist.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(np.ones((4, 40)), np.ones((4, 1)), batch_size=4, epochs=2, verbose=0, callbacks=[start])
    return [value.tobytes() for value in seen]


@on(("tf", 2))
def test_dropout_differs_between_ranks_and_steps(world: World) -> None:
    masks = [mask for rank in world.call(masks_in_fit) for mask in rank]
    assert len(masks) == 2 * 2
    assert len(set(masks)) == len(masks)


def test_alone_it_does_nothing() -> None:
    from tfdist.callbacks import BroadcastGlobalVariablesCallback

    with as_rank(0, 1):
        BroadcastGlobalVariablesCallback(0).on_train_begin()


def broadcast_in_the_first_step() -> str:
    """Keras's `fit` builds models before callbacks hear of them; a loop of `train_on_batch` does not."""
    import keras

    import tfdist

    model = make("deferred", tfdist.rank())
    model.compile(tfdist.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
    start = tfdist.callbacks.BroadcastGlobalVariablesCallback(0)
    start.set_model(model)
    start.on_train_begin()
    assert not model.built
    x, y = data()
    model.train_on_batch(x, y)
    return str(tfdist.check_in_sync(model))


@on(("tf", 2))
def test_model_that_is_built_in_its_first_step(world: World) -> None:
    assert len(set(world.call(broadcast_in_the_first_step))) == 1
