"""Passes at the end of an epoch that don't fill a window: applied, or carried; against one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.distributed import bodies, fitting
from tests.worlds import World, in_one_process, on

PASSES = 4
EPOCHS = 3
# Rows of each pass, by rank: unequal, and fewer passes on later ranks; six passes make a window and a half.
SIZES = [[8, 3, 8, 5, 8, 2], [4, 8, 1, 8, 7], [8, 8, 8, 2, 6, 5], [5]]


def rows_of(rank: int) -> list[list[int]]:
    edges = np.cumsum([0, *SIZES[rank]]) + 35 * rank
    return [list(range(edges[i], edges[i + 1])) for i in range(len(SIZES[rank]))]


def made(*, wrapped: bool, options: dict[str, Any], carries: bool = False, average: bool = True) -> Any:
    import keras

    import tfdist

    keras.utils.set_random_seed(7)
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(3)]
    )
    rate = keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.5)
    optimizer: Any = keras.optimizers.Adam(rate, use_ema=True, ema_momentum=0.5, global_clipnorm=0.5)
    if not average:
        optimizer = keras.optimizers.SGD(0.05)
    if wrapped:
        optimizer = tfdist.DistributedOptimizer(
            optimizer,
            backward_passes_per_step=PASSES,
            average_aggregated_gradients=average,
            last_window="carry" if carries else "apply",
        )
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), **options)
    return model


def trained(carries: bool, length: bool, options: dict[str, Any], average: bool = True) -> dict[str, Any]:
    """Trains on this rank's passes."""
    import tfdist

    model = made(wrapped=True, options=options, carries=carries, average=average)
    before = bodies.weights_of(model)
    data = fitting.dataset(rows_of(tfdist.rank()), length=length)
    validation = (fitting.X[fitting.VALIDATION], fitting.Y[fitting.VALIDATION])
    model.fit(data, epochs=EPOCHS, validation_data=validation, verbose=0)
    return bodies.outcome(model, before) | {"held": model.optimizer.passes_held}


def reference(carries: bool, ranks: int, average: bool = True) -> dict[str, Any]:
    """Plain Keras on whole windows."""
    lists = [rows_of(rank) for rank in range(ranks)]
    steps = max(map(len, lists))
    passes = [[row for each in lists if step < len(each) for row in each[step]] for step in range(steps)]
    stretches = [passes * EPOCHS] if carries else [passes] * EPOCHS
    windows = [each[i : i + PASSES] for each in stretches for i in range(0, len(each), PASSES)]
    if carries and len(windows[-1]) < PASSES:
        windows.pop()
    model = made(wrapped=False, options={}, average=average)
    before = bodies.weights_of(model)
    for window in windows:
        rows = [row for each in window for row in each]
        if not average:
            model.optimizer.learning_rate = 0.05 * len(window)
        model.train_on_batch(fitting.X[rows], fitting.Y[rows])
    model.optimizer.finalize_variable_values(model.trainable_variables)
    return bodies.outcome(model, before)


def assert_equal(results: list[dict[str, Any]], expected: dict[str, Any], held: int) -> None:
    assert len({result["digest"] for result in results}) == 1, "ranks differ"
    assert max(results[0]["moved"]) > 1e-3
    for result in results:
        assert result["iterations"] == expected["iterations"]
    assert max(result["held"] for result in results) == held
    for actual, wanted in zip(results[0]["weights"], expected["weights"], strict=True):
        np.testing.assert_allclose(actual, wanted, atol=1e-5, rtol=0)


OPTIONS = [{"run_eagerly": True}, {"steps_per_execution": 4}, {"jit_compile": True}]


@on(("single", 1), ("horovod", 2), ("tf", 4))
@pytest.mark.parametrize("length", [True, False], ids=["known length", "unknown length"])
def test_last_window_is_applied(world: World, length: bool) -> None:
    expected = in_one_process(reference, False, world.size)
    assert_equal(world.call(trained, False, length, {}), expected, 0)


@on(("single", 1), ("tf", 2))
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_last_window_in_every_mode(world: World, options: dict[str, Any]) -> None:
    expected = in_one_process(reference, False, world.size)
    assert_equal(world.call(trained, False, False, options), expected, 0)


@on(("single", 1), ("horovod", 2), thorough=[("tf", 4)])
@pytest.mark.parametrize("length", [True, False], ids=["known length", "unknown length"])
def test_last_window_is_carried(world: World, length: bool) -> None:
    expected = in_one_process(reference, True, world.size)
    assert_equal(world.call(trained, True, length, {}), expected, len(SIZES[0]) * EPOCHS % PASSES)


@on(("single", 1), ("tf", 2))
def test_sum_of_the_last_window_is_of_the_passes_that_it_holds(world: World) -> None:
    expected = in_one_process(reference, False, world.size, False)
    assert_equal(world.call(trained, False, False, {"steps_per_execution": 4}, False), expected, 0)


def trained_by_servers() -> dict[str, Any]:
    with bodies.under("parameter_server"):
        return trained(False, False, {}, False)


@on(("tf", 2))
def test_last_window_on_parameter_servers(world: World) -> None:
    expected = in_one_process(reference, False, world.size, False)
    assert_equal(world.call(trained_by_servers), expected, 0)


def failing(at: int) -> list[str]:
    """The last rank fails after a pass inside a window; then all train again."""
    import keras

    import tfdist

    class Failing(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == at and tfdist.rank() == tfdist.size() - 1:
                raise ValueError("raised")

    model = made(wrapped=True, options={})
    said = []
    for callbacks in ([Failing()], []):
        try:
            rows = [list(range(8 * i, 8 * i + 8)) for i in range(6)]
            model.fit(fitting.dataset(rows, length=True), verbose=0, callbacks=callbacks)
        except Exception as error:
            said.append(f"{type(error).__name__}, {model.optimizer.passes_held} held")
        else:
            said.append("trained")
        tfdist.check_in_sync(model)
    return [*said, str(int(model.optimizer.iterations)), str(model.optimizer.passes_held)]


@on(("tf", 2))
@pytest.mark.parametrize("at", [1, 5], ids=["first window", "last pass"])
def test_failure_inside_a_window_is_told_to_all_and_they_train_again(world: World, at: int) -> None:
    *others, failed = world.call(failing, at)
    assert failed[:2] == ["ValueError, 0 held", "trained"]
    assert all(each[:2] == ["PeerFailedError, 0 held", "trained"] for each in others)
    assert {(each[2], each[3]) for each in [*others, failed]} == {("2" if at == 1 else "3", "0")}


def loop(size: int) -> dict[str, Any]:
    """A loop of the user's own, of six passes with equal rows, then `apply_last_window`."""
    import keras
    import tensorflow as tf

    import tfdist

    weight = keras.Variable(1.0)
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.5), backward_passes_per_step=PASSES)
    step = tf.function(lambda gradient: optimizer.apply([gradient], [weight]))
    for number in range(6):
        step(tf.constant(float(number)))
    before = float(weight)
    optimizer.apply_last_window()
    optimizer.apply_last_window()
    return {"weights": [before, float(weight)], "iterations": int(optimizer.iterations)}


@on(("single", 1), ("tf", 2))
def test_loop_applies_its_last_window_once(world: World) -> None:
    for result in world.call(loop, world.size):
        assert result == {"weights": [1.0 - 0.5 * 1.5, 1.0 - 0.5 * 1.5 - 0.5 * 4.5], "iterations": 2}


def test_other_last_windows_are_refused() -> None:
    def refused() -> None:
        import tfdist

        with pytest.raises(ValueError, match='last_window must be "apply" or "carry"; received \'drop\''):
            tfdist.DistributedOptimizer("sgd", last_window="drop")

    in_one_process(refused)
