"""`Variable.assign_add` and `assign_sub` that add, rather than read, add and write (Keras >= 3.3).

Problem: `keras.Variable.assign_add(v)` is `assign(self + v)`. Where several devices or workers share one variable,
all of them read it before any of them writes: additions are lost, or, under strategies that sum what replicas
assign, the old value is added once per replica.

Solution: the `tf.Variable` underneath does the addition. In a stateless scope there is none, and Keras's own way
is right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_Method = Callable[[Any, Any], Any]


def atomic(name: str, original: _Method) -> _Method:
    """The method `name`, `assign_add` or `assign_sub`, of the TensorFlow backend's Variable."""
    import tensorflow as tf
    from keras.src.backend.common.stateless_scope import in_stateless_scope

    def method(self: Any, value: Any) -> Any:
        underneath = self._value
        if in_stateless_scope() or underneath is None:
            return original(self, value)
        value = self._convert_to_tensor(value, dtype=self.dtype)
        if not tf.TensorShape(value.shape).is_compatible_with(underneath.shape):
            return original(self, value)  # adds by broadcasting, or raises
        return getattr(underneath, name)(tf.cast(value, underneath.dtype))

    return method
