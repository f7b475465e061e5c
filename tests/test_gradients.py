"""Bucketing, sparse rows and accumulation: what needs no second rank."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.collectives.base import ReduceOp


@pytest.fixture
def alone() -> Any:
    import tfdist

    tfdist.init()
    yield
    tfdist.shutdown()


@given(st.lists(st.integers(0, 50)), st.integers(1, 60))
def test_buckets_hold_every_tensor_once_last_first_within_the_limit(sizes: list[int], limit: int) -> None:
    from tfdist.gradients import fill_buckets

    buckets = fill_buckets(sizes, limit)
    assert [i for bucket in buckets for i in bucket] == list(reversed(range(len(sizes))))
    for bucket in buckets:
        assert len(bucket) == 1 or sum(sizes[i] for i in bucket) <= limit
    for left, right in itertools.pairwise(buckets):
        assert sum(sizes[i] for i in left) + sizes[right[0]] > limit, "a bucket was closed too early"


@given(st.lists(st.integers(0, 4), max_size=12))
def test_duplicate_rows_are_summed(indices: list[int]) -> None:
    import tensorflow as tf

    from tfdist.gradients import sum_duplicate_rows, to_dense

    values = np.arange(len(indices) * 3, dtype="float32").reshape(-1, 3)
    expected = np.zeros((5, 3), "float32")
    np.add.at(expected, indices, values)
    slices = tf.IndexedSlices(
        tf.constant(values), tf.constant(indices, tf.int64), tf.constant([5, 3], tf.int64)
    )
    summed = sum_duplicate_rows(slices)
    assert sorted(summed.indices.numpy()) == sorted(set(indices))
    np.testing.assert_array_equal(to_dense(summed), expected)
    np.testing.assert_array_equal(to_dense(slices), expected)


def one_hot_twin(table: np.ndarray, tokens: np.ndarray, optimizer: Any) -> np.ndarray:
    """The same embedding as a matrix product, whose gradient is dense and therefore right."""
    import tensorflow as tf

    weight = tf.Variable(table)
    for _ in range(3):
        with tf.GradientTape() as tape:
            rows = tf.one_hot(tokens, len(table)) @ weight
            loss = tf.reduce_mean(tf.square(rows - 1.0))
        optimizer.apply([tape.gradient(loss, weight)], [weight])
    return weight.numpy()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("SGD", {"momentum": 0.9}),
        ("Adam", {}),
        ("RMSprop", {}),
        ("Adagrad", {}),
        ("Adam", {"clipnorm": 0.01}),
        ("Adam", {"global_clipnorm": 0.01}),
        ("Adam", {"clipvalue": 0.01}),
    ],
)
def test_embedding_with_repeated_tokens_equals_its_dense_twin(name: str, config: dict[str, Any]) -> None:
    import keras
    import tensorflow as tf

    import tfdist

    table = np.random.default_rng(0).standard_normal((6, 4)).astype("float32")
    tokens = np.array([1, 1, 2, 5, 1])
    make = getattr(keras.optimizers, name)
    expected = one_hot_twin(table, tokens, make(**config))
    weight = tf.Variable(table)
    optimizer = tfdist.DistributedOptimizer(make(**config))
    for _ in range(3):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.gather(weight, tokens) - 1.0))
        gradient = tape.gradient(loss, weight)
        assert isinstance(gradient, tf.IndexedSlices)
        optimizer.apply([gradient], [weight])
    np.testing.assert_allclose(weight.numpy(), expected, atol=1e-6)
    assert np.abs(weight.numpy() - table).max() > 1e-4


@pytest.mark.usefixtures("alone")
def test_large_table_stays_sparse() -> None:
    import tensorflow as tf

    from tfdist.gradients import GradientReducer

    weight = tf.Variable(tf.zeros([300_000, 4]))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.gather(weight, [7, 7, 9]))
    (reduced,) = GradientReducer("test").reduce([tape.gradient(loss, weight)], [weight])
    assert isinstance(reduced, tf.IndexedSlices)
    np.testing.assert_array_equal(reduced.indices, [7, 9])
    np.testing.assert_array_equal(reduced.values, [[2.0] * 4, [1.0] * 4])
    (dense,) = GradientReducer("test", sparse_as_dense=True).reduce([tape_of(weight)], [weight])
    assert dense.shape == (300_000, 4)


def tape_of(weight: Any) -> Any:
    import tensorflow as tf

    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.gather(weight, [7, 7, 9]))
    return tape.gradient(loss, weight)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("SGD", {"weight_decay": 0.1}),
        ("Adam", {}),
        ("AdamW", {"global_clipnorm": 0.05}),
        ("Adam", {"use_ema": True}),
        ("SGD", {"learning_rate": "schedule"}),
    ],
)
def test_passes_equal_one_large_batch(name: str, config: dict[str, Any]) -> None:
    import keras

    import tfdist
    from tests.distributed import models

    if config.get("learning_rate") == "schedule":
        config = {"learning_rate": keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)}

    def train(optimizer: Any, batch: int) -> tuple[list[np.ndarray], int]:
        keras.utils.set_random_seed(1)
        model = models.dense()
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        x, y = models.data("dense")
        model.fit(x, y, batch_size=batch, shuffle=False, verbose=0)
        return model.get_weights(), int(model.optimizer.iterations)

    make = getattr(keras.optimizers, name)
    expected, iterations = train(make(**config), models.GLOBAL_BATCH)
    passes = tfdist.DistributedOptimizer(make(**config), backward_passes_per_step=4)
    actual, applied = train(passes, models.GLOBAL_BATCH // 4)
    assert applied == iterations == models.STEPS
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.usefixtures("alone")
def test_sum_of_passes_on_request() -> None:
    import keras
    import tensorflow as tf

    import tfdist

    weight = tf.Variable(0.0)
    optimizer = tfdist.DistributedOptimizer(
        keras.optimizers.SGD(1.0), backward_passes_per_step=2, average_aggregated_gradients=False
    )
    for gradient in (1.0, 2.0, 5.0):
        optimizer.apply([tf.constant(gradient)], [weight])
    assert float(weight) == -3.0  # the third pass waits for its window


def test_reduce_op_names_are_horovods() -> None:
    assert {op.value for op in ReduceOp} >= {"Sum", "Average", "Min", "Max", "Product", "Adasum"}
