"""Any dtype as 32-bit words: how the `tf` engine moves what TensorFlow's collectives have no kernel for.

Problem: TensorFlow's gather, broadcast and all-to-all accept five or six dtypes (no bool, uint8 or bfloat16),
one dtype per call, and shapes that are known and equal on all ranks: the shape belongs to the identity of an
instance, so a size that changes from call to call needs a new instance key.

Solution: moving is not arithmetic, so tensors travel as their bits, reinterpreted as float32 words (float32
because that kernel exists on CPU and GPU alike), several tensors in one buffer. Sizes known only at run time
are padded to one of `SIZE_CLASSES` sizes, eight to the octave, so at most an eighth is wasted and a bounded
range of keys suffices.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

_STEPS_PER_OCTAVE = 8
_LARGEST = 2**36


def _class_sizes() -> list[int]:
    sizes = list(range(1, _STEPS_PER_OCTAVE + 1))  # never 0: TensorFlow's ring can't move an empty buffer
    step = 1
    while sizes[-1] < _LARGEST:
        sizes += [sizes[-1] + step * i for i in range(1, _STEPS_PER_OCTAVE + 1)]
        step *= 2
    return sizes


_SIZES = _class_sizes()
SIZE_CLASSES = len(_SIZES)


def size_class(longest: Any) -> tuple[Any, Any]:
    """The class that fits a size all ranks agree on.

    Args:
        longest: number of values, or an int64 scalar tensor.

    Returns:
        The class's number, 0 to `SIZE_CLASSES - 1`, and its size; tensors if `longest` is one.
    """
    if isinstance(longest, tf.Tensor):
        sizes = tf.constant(_SIZES, tf.int64)
        number = tf.searchsorted(sizes, tf.reshape(longest, [1]))[0]
        return number, tf.gather(sizes, number)
    place = bisect.bisect_left(_SIZES, longest)
    return place, _SIZES[place]


def pad(flat: Any, size: Any) -> Any:
    """Zeros behind a flat tensor, up to `size` values."""
    missing = size - _size(flat)
    if isinstance(missing, tf.Tensor) or missing > 0:
        return tf.concat([flat, tf.zeros([missing], flat.dtype)], 0)
    return flat


def count_words(elements: Any, dtype: Any) -> Any:
    """How many words `elements` values of a dtype fill; works on numbers and tensors."""
    per_word = 4 // dtype.size if dtype.size < 4 else 1
    return (elements + per_word - 1) // per_word * max(1, dtype.size // 4)


def to_words(tensor: Any) -> Any:
    """The bits of a tensor as float32 `[count_words(size)]`."""
    dtype = tensor.dtype
    flat = tf.reshape(tensor, [-1])
    if dtype == tf.float32:
        return flat
    if dtype == tf.bool:
        flat, dtype = tf.cast(flat, tf.uint8), tf.uint8
    elements = _size(flat)
    words = count_words(elements, dtype)
    if dtype.size >= 4:
        return tf.reshape(tf.bitcast(flat, tf.float32), [words])
    per_word = 4 // dtype.size
    filler = tf.zeros([words * per_word - elements], dtype)
    return tf.bitcast(tf.reshape(tf.concat([flat, filler], 0), [words, per_word]), tf.float32)


def from_words(words: Any, dtype: Any, elements: Any) -> Any:
    """Inverse of `to_words`: the first `elements` values, flat."""
    if dtype == tf.float32:
        return words
    if dtype == tf.bool:
        return tf.cast(from_words(words, tf.uint8, elements), tf.bool)
    if dtype.size <= 4:
        return tf.reshape(tf.bitcast(words, dtype), [-1])[:elements]
    return tf.bitcast(tf.reshape(words, [elements, dtype.size // 4]), dtype)


def plan_buckets(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Groups neighbours into buckets of at most `limit`; what is larger travels alone.

    Example:
        >>> plan_buckets([1, 2, 9, 1, 1], limit=4)
        [[0, 1], [2], [3, 4]]
    """
    buckets: list[list[int]] = []
    filled = math.inf
    for number, size in enumerate(sizes):
        if filled + size > limit:
            buckets.append([])
            filled = 0
        buckets[-1].append(number)
        filled += size
    return buckets


def static_size(tensor: Any) -> int | None:
    """Number of elements if the static shape tells it."""
    size = tensor.shape.num_elements()
    return None if size is None else int(size)


def _size(flat: Any) -> Any:
    size = static_size(flat)
    return tf.size(flat, out_type=tf.int64) if size is None else np.int64(size)
