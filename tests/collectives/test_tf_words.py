"""Bits in words, and size classes."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tests.collectives.cases import numpy_dtype
from tfdist.collectives import tf_words
from tfdist.collectives.base import split_rows

DTYPES = ["bool", "int8", "uint8", "int16", "uint16", "float16", "bfloat16", "int32", "uint32", "float32", "int64",
          "uint64", "float64", "complex64", "complex128"]  # fmt: skip


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 9])
def test_words_return_the_same_bits(name: str, size: int) -> None:
    dtype = numpy_dtype(name)
    values = np.random.default_rng(size).integers(0, 2, size * dtype.itemsize).astype(np.uint8)
    if name != "bool":
        values = values * 255
    array = values.view(dtype)
    words = tf_words.to_words(tf.constant(array))
    assert words.dtype == tf.float32
    assert words.shape == [tf_words.count_words(size, tf.as_dtype(dtype))]
    back = tf_words.from_words(words, tf.as_dtype(dtype), size)
    assert back.numpy().tobytes() == array.tobytes()


@given(st.integers(0, 2**36))
def test_size_class_wastes_at_most_an_eighth(longest: int) -> None:
    number, size = tf_words.size_class(longest)
    assert 0 <= number < tf_words.SIZE_CLASSES
    assert max(1, longest) <= size <= max(1, longest * 1.125 + 1)


@pytest.mark.parametrize("longest", [0, 1, 8, 9, 100, 12345, 2**33])
def test_size_class_is_the_same_in_a_graph(longest: int) -> None:
    number, size = tf_words.size_class(tf.constant(longest, tf.int64))
    assert (int(number), int(size)) == tf_words.size_class(longest)


def test_sizes_of_classes_ascend() -> None:
    sizes = tf_words._SIZES
    assert sizes[0] == 1
    assert sizes == sorted(set(sizes))


@given(st.lists(st.integers(0, 50)), st.integers(1, 60))
def test_buckets_keep_order_and_limit(sizes: list[int], limit: int) -> None:
    buckets = tf_words.plan_buckets(sizes, limit)
    assert [place for bucket in buckets for place in bucket] == list(range(len(sizes)))
    for bucket in buckets:
        assert len(bucket) == 1 or sum(sizes[place] for place in bucket) <= limit


@given(st.integers(0, 1000), st.integers(1, 20))
def test_rows_are_split_as_numpy_does(rows: int, parts: int) -> None:
    assert split_rows(rows, parts) == [len(part) for part in np.array_split(np.zeros(rows), parts)]
