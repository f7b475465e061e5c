"""A train step that changes no variable: what it would have written is handed out instead (Keras >= 3.3).

Problem: `Model.train_step` updates weights, metrics, moving statistics and seeds where it runs. `assign_add` of a
Keras variable reads the value, adds to it and writes the sum, so of two workers that do so at the same time one is
lost; and a worker that dies has done a part of it, which its successor does again.

Solution: one of Keras's own stateless scopes keeps all writes back, as amounts by which variables change.
They can be applied later, in one go, whatever the variables have become meanwhile. Metrics are seen as empty,
since their states are sums, so they need not be read at all. Other variables are read once: a second read may
see another value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_compat.replay_scopes import VariableNeeded


class ReadTwice(VariableNeeded):
    """A variable is written that was not known to be: it belongs among `changed`."""


class KeptBack(keras.StatelessScope):  # type: ignore[misc, unused-ignore]
    """Inside, variables keep their values; made and entered within one graph.

    Args:
        empty: variables that are seen as zero, whose changes are sums.
        changed: other variables that may be written.
    """

    def __init__(self, empty: Sequence[Any], changed: Sequence[Any]) -> None:
        super().__init__(collect_losses=True, initialize_variables=False)
        self._graph = tf.compat.v1.get_default_graph()
        self._before = {id(each): tf.zeros(each.shape, each.dtype) for each in empty}
        self._changed = {id(each) for each in changed}
        self._written: dict[int, tuple[Any, Any]] = {}

    @property
    def changes(self) -> list[tuple[Any, Any]]:
        """Variables that were written, and by how much they change."""
        return [(variable, value - self._before[key]) for key, (variable, value) in self._written.items()]

    def value_read(self, variable: Any) -> Any:
        """What the step has read of one of the `changed`; None if it has not read it."""
        return self._before.get(id(variable))

    def get_current_value(self, variable: Any) -> Any:
        """The value of `variable` in this step."""
        key = id(variable)
        if key in self._written:
            return self._written[key][1]
        if key in self._changed and key not in self._before:
            with self._graph.as_default():
                self._before[key] = tf.identity(variable._value)
        # A weight stays a variable, which the tape watches, and of which an embedding reads single rows.
        return self._before.get(key, variable._value)

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Keeps back what is assigned; later reads see it."""
        variable, value = update
        if tf.compat.v1.get_default_graph() is not self._graph:
            raise ValueError(
                "A worker of an asynchronous strategy can't assign variables inside a loop or branch of the "
                f"train step; received an assignment to {getattr(variable, 'path', variable.name)!r} inside "
                "tf.while_loop or tf.cond. Move the assignment out of it."
            )
        if id(variable) not in self._before and id(variable) not in self._changed:
            raise ReadTwice(variable)
        self.get_current_value(variable)
        self._written[id(variable)] = (variable, value)
