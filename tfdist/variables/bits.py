"""Sends variables as bytes: exact to the bit for every dtype, and many small ones in one collective.

Numbers would need a collective per dtype, casts for dtypes that an engine lacks, and would not keep NaN
payloads; a hash over bytes and a copy of bytes agree with each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tfdist import world
from tfdist.collectives.base import Group

_BUFFER_BYTES = 32 << 20


def tensor_of(variable: Any) -> Any:
    """Current value of a `keras.Variable`, a `tf.Variable` or a tensor."""
    value = getattr(variable, "value", variable)
    return variable.read_value() if callable(value) else value  # tf.Variable.value is a method


def array_of(variable: Any) -> npt.NDArray[Any]:
    """Current value as a numpy array."""
    return np.asarray(tensor_of(variable))


def packs(variables: Sequence[Any]) -> Iterator[list[Any]]:
    """Cuts a list of variables into runs whose bytes fit one buffer; a larger variable goes alone."""
    pack: list[Any] = []
    used = 0
    for variable in variables:
        size = _bytes(variable)
        if pack and used + size > _BUFFER_BYTES:
            yield pack
            pack, used = [], 0
        pack.append(variable)
        used += size
    if pack:
        yield pack


def broadcast_bits(values: Sequence[Any], root: int, *, name: str, group: Group) -> list[Any]:
    """The root's tensors, in one collective; all ranks of the group call it with equal shapes and dtypes."""
    buffer = tf.concat([_to_bytes(value) for value in values], axis=0)
    (received,) = world.current().engine.broadcast([buffer], root, name=name, group=group)
    parts = tf.split(received, [_bytes(value) for value in values])
    return [
        _from_bytes(part, value.dtype, value.shape.as_list())
        for part, value in zip(parts, values, strict=True)
    ]


def _bytes(value: Any) -> int:
    size: int = tf.as_dtype(value.dtype).size
    return int(np.prod(value.shape, dtype=np.int64)) * size


def _to_bytes(value: Any) -> Any:
    if value.dtype.is_bool:
        value = tf.cast(value, tf.uint8)
    elif value.dtype != tf.uint8:
        value = tf.bitcast(value, tf.uint8)
    return tf.reshape(value, [-1])


def _from_bytes(part: Any, dtype: Any, shape: list[int]) -> Any:
    if dtype.is_bool:
        return tf.cast(tf.reshape(part, shape), tf.bool)
    if dtype.size == 1:
        part = tf.reshape(part, shape)
        return part if dtype == tf.uint8 else tf.bitcast(part, dtype)
    return tf.bitcast(tf.reshape(part, [*shape, dtype.size]), dtype)
