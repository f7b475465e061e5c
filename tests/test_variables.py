"""Broadcast, rank-distinct random states, and the proof that ranks are in sync, on every backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.worlds import World, on

DTYPES = ["float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64", "bool"]


def trained_model(seed: int, *, names_used_before: int = 0, batch_norm: bool = False) -> Any:
    """A model that this rank trained alone for one step, so that its optimizer has slots."""
    import keras

    import tfdist

    keras.utils.set_random_seed(seed)
    for _ in range(names_used_before):
        keras.layers.Dense(1)
    layers = [keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
    if batch_norm:
        layers.insert(2, keras.layers.BatchNormalization())
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.Adam(10.0 ** -(seed + 1)), "mse", run_eagerly=True)
    with tfdist.local():
        model.fit(np.full((4, 3), seed + 1.0), np.ones((4, 1)), epochs=seed + 1, verbose=0)
    return model


# --- broadcast_variables --------------------------------------------------------------------------------


def broadcast_all_dtypes(root: int, in_graph: bool) -> list[Any]:
    import keras
    import tensorflow as tf

    import tfdist

    variables: list[Any] = [
        tf.Variable(tf.cast(tf.fill([2, 3], tfdist.rank() + 1), dtype), name=dtype) for dtype in DTYPES
    ]
    variables[DTYPES.index("bool")].assign(tf.fill([2, 3], tfdist.rank() % 2 == 1))
    variables.append(keras.Variable(np.full((5,), np.nan if tfdist.rank() == root else 1.0), name="keras"))
    variables.append(tf.Variable(tf.zeros([0, 7]), name="empty"))
    variables.append(tf.Variable(float(tfdist.rank()), name="scalar"))

    def run() -> None:
        tfdist.broadcast_variables(variables, root_rank=root)

    (tf.function(run) if in_graph else run)()
    return [np.asarray(tf.cast(tf.convert_to_tensor(variable), "float64")) for variable in variables]


@pytest.mark.parametrize("in_graph", [False, True])
def test_broadcast_gives_the_roots_bits_for_every_dtype(world: World, in_graph: bool) -> None:
    root = world.size - 1
    for values in world.call(broadcast_all_dtypes, root, in_graph):
        for dtype, value in zip(DTYPES, values, strict=False):
            expected = root % 2 == 1 if dtype == "bool" else root + 1
            np.testing.assert_array_equal(value, np.full((2, 3), expected), err_msg=dtype)
        assert np.isnan(values[-3]).all()
        assert values[-1] == root


def broadcast_large(megabytes: int) -> list[float]:
    import tensorflow as tf

    import tfdist

    variables = [tf.Variable(tf.fill([megabytes << 17], float(tfdist.rank() + part))) for part in range(4)]
    tfdist.broadcast_variables(variables, 1)
    return [float(tf.reduce_mean(variable)) for variable in variables]


@on(("tf", 2), ("horovod", 2))
def test_broadcast_of_more_than_one_pack(world: World) -> None:
    assert world.call(broadcast_large, 24) == [[1.0, 2.0, 3.0, 4.0]] * 2


def broadcast_different_lists() -> None:
    import tensorflow as tf

    import tfdist

    shape = [2, 3] if tfdist.rank() == 0 else [3, 2]
    tfdist.broadcast_variables(
        [tf.Variable(1.0, name="same"), tf.Variable(tf.zeros(shape), name="kernel_7")], 0
    )


def invalid_broadcasts() -> list[str]:
    import tensorflow as tf

    import tfdist

    errors = []
    for variable, root in ((tf.Variable(1.0), tfdist.size()), (tf.Variable("text", name="words"), 0)):
        with pytest.raises((ValueError, TypeError)) as caught:
            tfdist.broadcast_variables([variable], root)
        errors.append(str(caught.value))
    with pytest.raises(NotImplementedError, match="broadcast_variables"):
        tfdist.broadcast_global_variables(0)
    return errors


@on(("tf", 2))
def test_different_lists_are_an_error_that_names_the_first_difference(world: World) -> None:
    for outcome in world.outcomes(broadcast_different_lists):
        assert outcome.kind == "CollectiveMismatchError"
        assert "position 1: rank 0 has kernel:0 float32[2, 3], rank 1 has kernel:0 float32[3, 2]" in str(
            outcome.error
        )


@on(("single", 1), ("tf", 2))
def test_invalid_broadcasts_are_refused(world: World) -> None:
    for errors in world.call(invalid_broadcasts):
        assert f"Received: {world.size}" in errors[0]
        assert "words" in errors[1]


# --- broadcast_model and check_in_sync ------------------------------------------------------------------


def broadcast_a_model(root: int) -> dict[str, Any]:
    import tfdist
    from tfdist.variables import broadcast_model, fingerprint

    model = trained_model(tfdist.rank(), names_used_before=3 * tfdist.rank())
    before = fingerprint(model)
    broadcast_model(model, root)
    return {
        "before": before,
        "after": fingerprint(model),
        "in_sync": tfdist.check_in_sync(model),
        "iterations": int(model.optimizer.iterations.numpy()),
        "rate": float(model.optimizer.learning_rate.numpy()),
    }


def test_model_and_optimizer_become_the_roots(world: World) -> None:
    root = world.size - 1
    ranks = world.call(broadcast_a_model, root)
    assert len({rank["before"] for rank in ranks}) == world.size
    assert {rank["after"] for rank in ranks} == {rank["in_sync"] for rank in ranks} == {ranks[root]["before"]}
    assert {rank["iterations"] for rank in ranks} == {root + 1}
    assert {rank["rate"] for rank in ranks} == {ranks[root]["rate"]}


def unbuilt_optimizer_and_model() -> tuple[int, str]:
    import keras

    import tfdist
    from tfdist.variables import broadcast_model

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    broadcast_model(model)
    with pytest.raises(ValueError, match="has no variables yet") as caught:
        tfdist.check_in_sync(keras.Sequential([keras.layers.Dense(1)]))
    return len(model.optimizer.variables), str(caught.value)


@on(("single", 1), ("tf", 2))
def test_builds_the_optimizer_but_not_the_model(world: World) -> None:
    for slots, error in world.call(unbuilt_optimizer_and_model):
        assert slots == 6, "iterations, learning rate, two slots for kernel and bias"
        assert "model.build(input_shape)" in error


def drift(change: str, ignore: list[str] | None) -> str:
    import tfdist
    from tfdist.variables import broadcast_model

    model = trained_model(1, batch_norm=True)
    broadcast_model(model)
    if tfdist.rank() == 1:
        target = {
            "bias": model.layers[-1].bias,
            "iterations": model.optimizer.iterations,
            "slot": model.optimizer._velocities[0],
            "moving": model.layers[1].moving_mean,
        }[change]
        target.assign(target + 1)
    return tfdist.check_in_sync(model) if ignore is None else tfdist.check_in_sync(model, ignore=ignore)


@pytest.mark.parametrize(
    ("change", "ignore", "path"),
    [
        ("bias", None, "dense/bias float32[1]"),
        ("iterations", None, "iteration int"),
        ("slot", None, "velocity float32[3, 4]"),
        ("moving", [], "batch_normalization/moving_mean float32[4]"),
    ],
)
@on(("tf", 4), ("horovod", 2))
def test_drift_is_named(world: World, change: str, ignore: list[str] | None, path: str) -> None:
    others = "0, 2, 3" if world.size == 4 else "0"
    for outcome in world.outcomes(drift, change, ignore):
        assert outcome.kind == "OutOfSyncError"
        for part in (path, "First of 1 differing", "rank 1 by up to 1;", f"equal: rank {others}"):
            assert part in str(outcome.error)


@on(("tf", 4), ("horovod", 2))
def test_moving_statistics_may_differ(world: World) -> None:
    assert len(set(world.call(drift, "moving", None))) == 1


# --- random states --------------------------------------------------------------------------------------


def dropout_masks(root: int) -> dict[str, Any]:
    import keras

    from tfdist.variables import offset_seeds

    keras.utils.set_random_seed(3)  # the same on every rank
    dropout = keras.layers.Dropout(0.5)
    model = keras.Sequential([keras.Input((64,)), dropout])
    drawn = np.ones((2, 64), "float32")

    def draw() -> tuple[np.ndarray, np.ndarray]:
        return np.asarray(model(drawn, training=True)), np.asarray(keras.random.uniform((8,)))

    offset_seeds(model, root)
    first, second = draw(), draw()
    offset_seeds(model, root)
    state = np.asarray(dropout.seed_generator.state)
    offset_seeds(model, root)
    again = np.asarray(dropout.seed_generator.state)
    keras.utils.set_random_seed(3)
    reference = keras.layers.Dropout(0.5)
    return {
        "first": first,
        "second": second,
        "stable": bool((state == again).all()),
        "plain": np.asarray(reference(drawn, training=True)),
    }


@on(("single", 1), ("tf", 4), ("horovod", 2))
def test_ranks_draw_other_masks_and_the_root_those_of_one_process(world: World) -> None:
    ranks = world.call(dropout_masks, 0)
    for draws in ("first", "second"):
        for source in (0, 1):
            assert len({rank[draws][source].tobytes() for rank in ranks}) == world.size
    assert all(rank["stable"] for rank in ranks)
    np.testing.assert_array_equal(ranks[0]["first"][0], ranks[0]["plain"])
    repeated = world.call(dropout_masks, 0)
    for one, other in zip(ranks, repeated, strict=True):
        np.testing.assert_array_equal(one["first"][0], other["first"][0])
