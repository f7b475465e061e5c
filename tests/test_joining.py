"""`tfdist.join`: loops of the user's own, with more data on some ranks than on others."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.distributed import bodies, models
from tests.worlds import World, in_one_process, on

ROWS = 4  # of each rank in a step
STEPS = 5  # of the last rank; the others have fewer
WORLDS = on(("horovod", 2), ("tf", 4))


def steps_of(rank: int, size: int) -> int:
    return max(1, STEPS - 2 * (size - 1 - rank))


def batch_of(kind: str, rank: int, size: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    x, y = models.data(kind, steps=size * STEPS, batch=ROWS)
    first = (rank * STEPS + step) * ROWS
    return x[first : first + ROWS], y[first : first + ROWS]


def train(kind: str, mode: str, size: int, rounds: int = 1, passes: int = 1) -> dict[str, Any]:
    """Trains on this rank's steps and joins; one process takes the data of all `size` ranks."""
    import keras
    import tensorflow as tf

    import tfdist

    keras.utils.set_random_seed(3)
    model = models.MODELS[kind]() if tfdist.size() > 1 else models.reference(kind)
    inner = keras.optimizers.Adam(0.01, global_clipnorm=0.5)
    optimizer = bodies.wrap(inner, backward_passes_per_step=passes)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        optimizer.apply(tape.gradient(value, model.trainable_variables), model.trainable_variables)

    run = tf.function(step, reduce_retracing=True) if mode == "graph" else step
    before = bodies.weights_of(model)
    last = []
    for _ in range(rounds):
        for group in range(0, STEPS, passes):
            window = range(group, min(group + passes, STEPS))
            if tfdist.size() == 1:
                parts = [
                    batch_of(kind, rank, size, number)
                    for number in window
                    for rank in range(size)
                    if number < steps_of(rank, size)
                ]
                run(*(tf.constant(np.concatenate(values)) for values in zip(*parts, strict=True)))
                continue
            for number in window:
                if number < steps_of(tfdist.rank(), size):
                    run(*map(tf.constant, batch_of(kind, tfdist.rank(), size, number)))
        last.append(tfdist.join())
    return {**bodies.outcome(model, before, inner), "last": last}


def assert_equal(results: list[dict[str, Any]], expected: dict[str, Any], last: list[int]) -> None:
    assert len({result["digest"] for result in results}) == 1, "ranks differ"
    for result in results:
        assert result["last"] == last
        assert result["iterations"] == expected["iterations"]
    assert max(results[0]["moved"]) > 1e-3
    for actual, wanted in zip(results[0]["weights"], expected["weights"], strict=True):
        np.testing.assert_allclose(actual, wanted, atol=1e-5, rtol=0)


@WORLDS
@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_ranks_with_less_data_join(world: World, mode: str) -> None:
    expected = in_one_process(train, "dense", mode, world.size, 2)
    results = world.call(train, "dense", mode, world.size, 2)
    assert_equal(results, expected, [world.size - 1] * 2)


@on(("tf", 2), ("horovod", 2))
def test_sparse_rows(world: World) -> None:
    expected = in_one_process(train, "embedding", "graph", world.size)
    assert_equal(world.call(train, "embedding", "graph", world.size), expected, [1])


@on(("single", 1))
def test_alone_it_returns_at_once(world: World) -> None:
    assert world.call(train, "dense", "eager", 1)[0]["last"] == [0]


def two_optimizers() -> dict[str, Any]:
    """As a GAN: one optimizer takes two turns for each of the other."""
    import keras
    import tensorflow as tf

    import tfdist

    weights = [keras.Variable([1.0, 2.0], name=name) for name in ("first", "second")]
    optimizers = [tfdist.DistributedOptimizer(keras.optimizers.SGD(0.5)) for _ in weights]

    def step_of(place: int) -> Any:
        optimizer, weight = optimizers[place], weights[place]
        return tf.function(lambda gradient: optimizer.apply([gradient], [weight]))

    steps = [step_of(place) for place in range(2)]
    # A rank that joins meets the other in the order in which that one goes on.
    for number in range(2 + 2 * tfdist.rank()):
        for place in (0, 1, 1):
            steps[place](tf.constant([float(number), 1.0 + tfdist.rank()]))
    last = tfdist.join()
    return {"weights": [weight.numpy().tolist() for weight in weights], "last": last}


@on(("tf", 2), ("horovod", 2))
def test_several_optimizers_in_any_order(world: World) -> None:
    both, alone = [0.0, 1.5], [0.0, 2.0]  # mean of the second component, while rank 0 has data and after
    expected = []
    for turns in (1, 2):
        first = 1.0 - 0.5 * turns * (0 + 1 + 2 + 3)
        second = 2.0 - 0.5 * turns * (2 * both[1] + 2 * alone[1])
        expected.append([first, second])
    for result in world.call(two_optimizers):
        assert result == {"weights": expected, "last": 1}


def refusal() -> str:
    """What `join` says instead of joining."""
    import tfdist

    try:
        tfdist.join()
    except tfdist.TfdistError as error:
        return str(error)
    return ""


def join_without_a_step() -> str:
    from tfdist import joining

    joining._used.clear()
    return refusal()


@on(("tf", 2))
def test_join_before_any_update_is_an_error(world: World) -> None:
    for rank, said in enumerate(world.call(join_without_a_step)):
        assert said.startswith(f"rank {rank} called tfdist.join() before any update")
        assert "at least one batch" in said


def apply_twice_in_a_function() -> str:
    import keras
    import tensorflow as tf

    import tfdist

    weight = keras.Variable([1.0])
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.5))

    @tf.function  # type: ignore[untyped-decorator]
    def step() -> None:
        optimizer.apply([tf.constant([1.0])], [weight])
        optimizer.apply([tf.constant([2.0])], [weight])

    step()
    return refusal()


@on(("tf", 2))
def test_optimizer_applied_twice_in_a_function_is_refused(world: World) -> None:
    for said in world.call(apply_twice_in_a_function):
        assert "several times" in said
        assert "tfdist.shard" in said


def join_while_the_last_one_dies() -> tuple[str, str, float]:
    import keras
    import tensorflow as tf

    import tfdist

    weight = keras.Variable([1.0])
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.5))
    step = tf.function(lambda gradient: optimizer.apply([gradient], [weight]))
    last = tfdist.rank() == tfdist.size() - 1
    for _ in range(3 if last else 1):
        step(tf.constant([1.0]))
    if last:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        tfdist.join()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "joined", "", 0.0


@pytest.mark.parametrize("backend", ["tf", "horovod"])
def test_rank_that_dies_is_named_to_those_who_have_joined(
    fresh_world: Callable[..., World], backend: str
) -> None:
    world = fresh_world(backend, 3)
    *joined, dead = world.outcomes(join_while_the_last_one_dies)
    assert dead.kind == "Died"
    for outcome in joined:
        kind, message, seconds = outcome.value
        assert kind == "PeerLostError", message
        assert "rank 2" in message.lower()
        # Rank 0 waits for rank 1, which has noticed, and whose process goes on.
        assert seconds < 30.0, "it waited for the timeout of 60 s"
