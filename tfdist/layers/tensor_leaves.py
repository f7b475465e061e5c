"""Nested arguments and results as a flat list of tensors, masks of Keras included, and back.

`tf.custom_gradient` takes and gives tensors only, and in graph mode positional ones; layers take and give
structures, keyword arguments, sparse and ragged tensors, and tensors with a Keras mask on them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

_MASK = "_keras_mask"


class TensorLeaves:
    """What is not a tensor in a structure, and where the tensors go.

    Attributes:
        structure: as given.
        tensors: the tensors in `structure`, components of sparse and ragged ones, and masks.
        masked: whether there are masks.

    Args:
        structure: anything; what isn't a tensor in it is kept as it is.
    """

    def __init__(self, structure: Any) -> None:
        self.structure = structure
        self._leaves = keras.tree.flatten(structure)
        self.tensors: list[Any] = []
        self.masked = False
        for leaf in self._leaves:
            if tf.is_tensor(leaf):
                self.tensors += _components(leaf)
                mask = getattr(leaf, _MASK, None)
                if mask is not None:
                    self.tensors.append(mask)
                    self.masked = True

    def filled(self, tensors: Sequence[Any]) -> Any:
        """The structure with others in place of `self.tensors`."""
        values = iter(tensors)
        return keras.tree.pack_sequence_as(self.structure, [_replaced(leaf, values) for leaf in self._leaves])


def holds_composite(structure: Any) -> bool:
    """Whether there are sparse or ragged tensors in it."""
    return any(isinstance(leaf, tf.__internal__.CompositeTensor) for leaf in keras.tree.flatten(structure))


def _components(leaf: Any) -> list[Any]:
    parts: list[Any] = tf.nest.flatten(leaf, expand_composites=True)
    return [tf.convert_to_tensor(part) for part in parts]


def _replaced(leaf: Any, values: Iterator[Any]) -> Any:
    if not tf.is_tensor(leaf):
        return leaf
    parts = [next(values) for _ in tf.nest.flatten(leaf, expand_composites=True)]
    composite = isinstance(leaf, tf.__internal__.CompositeTensor)
    result = tf.nest.pack_sequence_as(leaf, parts, expand_composites=True) if composite else parts[0]
    if getattr(leaf, _MASK, None) is not None:
        setattr(result, _MASK, next(values))
    return result
