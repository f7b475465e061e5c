"""Checks and identities of the public collectives in a world of one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfdist


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    tfdist.init()
    yield
    tfdist.shutdown()


def test_before_init() -> None:
    tfdist.shutdown()
    with pytest.raises(tfdist.NotInitializedError, match=r"tfdist\.init"):
        tfdist.allreduce(tf.constant(1.0))
    tfdist.init()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: tfdist.allreduce(tf.constant(1)), r"Average takes float16.*received int32.*Sum"),
        (lambda: tfdist.allreduce(tf.constant(True), op=tfdist.Sum), r"received bool.*LogicalAnd"),
        (lambda: tfdist.allreduce(tf.constant(1.0), op=tfdist.LogicalOr), r"received float32"),
        (lambda: tfdist.allreduce(tf.constant("a"), op=tfdist.Sum), r"received string"),
        (lambda: tfdist.allreduce(tf.constant(1.0), op="sum"), r"received 'sum'"),
        (lambda: tfdist.allreduce(tf.constant(1.0), True, op=tfdist.Sum), r"not both"),
        (lambda: tfdist.allreduce(tf.constant(1.0), op=tfdist.Adasum), r"Horovod engine only"),
        (lambda: tfdist.allreduce(tf.constant(1), op=tfdist.Sum, prescale_factor=0.5), r"apply to floats"),
        (lambda: tfdist.allreduce(tf.constant(1.0), name=3), r"received 3"),
        (lambda: tfdist.allgather(tf.constant(1.0)), r"at least 1.*Reshape"),
        (lambda: tfdist.allgather(tf.constant(["a"])), r"received string.*allgather_object"),
        (
            lambda: tfdist.broadcast(tf.constant(1.0), 1),
            r"root_rank must be one of the ranks \[0\]; received 1",
        ),
        (lambda: tfdist.reduce(tf.constant(1.0), -1), r"received -1"),
        (lambda: tfdist.reducescatter(tf.constant(1.0)), r"at least 1"),
        (lambda: tfdist.alltoall(tf.zeros([3]), splits=[2]), r"received \[2\] on rank 0"),
        (lambda: tfdist.alltoall(tf.zeros([3]), splits=[1, 2]), r"received shape \(2,\)"),
        (lambda: tfdist.broadcast_object(1, session=3), r"received 3"),
        (lambda: tfdist.ProcessSet([0, 0]), r"received \[0, 0\]"),
        (lambda: tfdist.ProcessSet([-1]), r"received \[-1\]"),
        (lambda: tfdist.add_process_set([1]), r"ranks 0 to 0"),
        (lambda: tfdist.add_process_set([0]), r"exists already"),
        (lambda: tfdist.allreduce(tf.constant(1.0), process_set=tfdist.ProcessSet([0])), r"not registered"),
    ],
)
def test_errors_state_rule_and_value(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(tfdist.TfdistError, match=text):
        call()


def test_objects_only_eagerly() -> None:
    with pytest.raises(tfdist.TfdistError, match="called eagerly"):
        tf.function(lambda: tfdist.broadcast_object(1))()


def test_variables_and_numbers_are_tensors_too() -> None:
    assert float(tfdist.allreduce(tf.Variable(2.0))) == 2.0
    assert float(tfdist.allreduce(2.0)) == 2.0
    assert np.array_equal(tfdist.allgather(np.ones([2, 3])), np.ones([2, 3]))


def test_average_is_horovods_old_form() -> None:
    assert float(tfdist.allreduce(tf.constant(2.0), True)) == 2.0
    assert int(tfdist.allreduce(tf.constant(2), False)) == 2


def test_an_empty_group() -> None:
    assert tfdist.grouped_allreduce([]) == []
    assert tfdist.grouped_allgather([]) == []
    assert tfdist.grouped_reducescatter([]) == []


def test_product_has_no_gradient() -> None:
    x = tf.constant(1.0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tfdist.allreduce(x, op=tfdist.Product)
    with pytest.raises(tfdist.TfdistError, match="no gradient"):
        tape.gradient(y, x)


def test_integers_have_no_gradient() -> None:
    x = tf.constant([1.0, 2.0])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y, count = tfdist.grouped_allreduce([x, tf.constant(3)], op=tfdist.Sum)
    assert tape.gradient(y, x).numpy().tolist() == [1.0, 1.0]
    assert int(count) == 3


def test_translate_leaves_other_errors_alone() -> None:
    error = tf.errors.InvalidArgumentError(None, None, "Incompatible shapes: [2] vs. [3]")
    assert tfdist.operations.translate(error) is error
    assert tfdist.operations.translate(ValueError("collective")).args == ("collective",)
