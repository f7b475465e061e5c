"""Variables and slots of a built model on devices of choice (Keras >= 3.3).

Problem: Keras makes a layer's variables where the layer is built, which is before anyone knows where it will run,
and an optimizer's slots on the default device.

Solution: a `keras.Variable` holds its `tf.Variable` in `_value`, so it can hold another one, of the same value, on
another device; layers and optimizers keep referring to the `keras.Variable`. Optimizers make every slot in
`add_variable_from_reference`, which is wrapped on the instance.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.keras_compat.partial_optimizer import innermost


def move_variable(variable: Any, device: str) -> None:
    """Puts a built `keras.Variable` on a device; its value stays."""
    old = variable._value
    with tf.init_scope(), tf.device(device):
        variable._value = tf.Variable(
            old.numpy(),
            trainable=old.trainable,
            dtype=old.dtype,
            name=variable.name,
            aggregation=old.aggregation,
        )


def find_moved(optimizer: Any) -> None:
    """Has a built optimizer, which knows variables by their `tf.Variable`s, know those that were moved."""
    for each in innermost(optimizer):
        if each.built:
            known = {
                each._var_key(variable): number for number, variable in enumerate(each._trainable_variables)
            }
            each._trainable_variables_indices = known


def place_slots(optimizer: Any) -> None:
    """Has an optimizer that isn't built yet make its slots on the devices of its variables."""
    for each in innermost(optimizer):
        if "add_variable_from_reference" not in vars(each):
            vars(each)["add_variable_from_reference"] = _beside(each.add_variable_from_reference)


def _beside(add: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(add)
    def add_variable_from_reference(reference_variable: Any, *args: Any, **options: Any) -> Any:
        held = getattr(reference_variable, "_value", reference_variable)
        with tf.device(held.device):
            return add(reference_variable, *args, **options)

    return add_variable_from_reference
