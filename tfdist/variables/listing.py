"""Which variables make up the state of a model, and agreement of all ranks on that list."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tfdist import keras_compat, world
from tfdist.errors import CollectiveMismatchError


def require_built(model: Any) -> None:
    """Raises ValueError for a model that has no variables yet."""
    if not model.built:
        raise ValueError(
            f"The model {model.name!r} has no variables yet. Give it an Input, call "
            "`model.build(input_shape)`, or call it once on a batch."
        )


def path_of(variable: Any) -> str:
    """Where the variable sits in its model."""
    return str(getattr(variable, "path", None) or variable.name)


def describe(variable: Any) -> str:
    """Path, dtype and shape, without the numbers that Keras adds to names used before in the process."""
    dtype = tf.as_dtype(variable.dtype)
    if not (dtype.is_floating or dtype.is_integer or dtype.is_complex or dtype.is_bool):
        raise TypeError(
            f"Only numbers can be sent to other ranks. Received: variable {path_of(variable)} of {dtype}."
        )
    return f"{re.sub(r'_[0-9]+', '', path_of(variable))} {dtype.name}{list(variable.shape)}"


def model_state(model: Any, *, ignore: Sequence[str] = ()) -> list[Any]:
    """Weights and optimizer variables that all ranks have, without random states and metrics.

    Args:
        model: a built `keras.Model`.
        ignore: last path components of weights to leave out.
    """
    require_built(model)
    optimizer = getattr(model, "optimizer", None)
    weights = [weight for weight in model.weights if path_of(weight).rsplit("/", 1)[-1] not in ignore]
    return [*weights, *common_variables(optimizer)]


def common_variables(optimizer: Any) -> list[Any]:
    """Variables of an optimizer that all ranks have: without slots that only one rank keeps."""
    if optimizer is None:
        return []
    return [variable for variable in optimizer.variables if keras_compat.kept_here(variable) is None]


def seed_states(model: Any) -> list[Any]:
    """States of the seed generators: those of the model's layers, and Keras's global one."""
    # The global generator comes into being when it is first drawn from: after the offset, and with an equal
    # state on every rank. This brings it about now. Keras has no public way to it.
    from keras.src.random.seed_generator import global_seed_generator

    # `model.variables` is `model.weights` and the layers' seed generators.
    weights = {id(weight) for weight in model.weights}
    states = [
        variable
        for variable in model.variables
        if id(variable) not in weights and path_of(variable).endswith("seed_generator_state")
    ]
    return [*states, global_seed_generator().state]


def bytes_of(variable: Any) -> int:
    """Size of a `keras.Variable` or a `tf.Variable`."""
    return int(math.prod(variable.shape) * tf.as_dtype(variable.dtype).size)


def tensor_of(variable: Any) -> Any:
    """Current value of a `keras.Variable` or a `tf.Variable`."""
    value = getattr(variable, "value", variable)
    return variable.read_value() if callable(value) else tf.convert_to_tensor(value)


def array_of(variable: Any) -> npt.NDArray[Any]:
    """Current value as a numpy array."""
    return np.asarray(tensor_of(variable))


def agree_on_list(described: Sequence[str], *, what: str, ranks: Sequence[int] | None = None) -> None:
    """Raises on every rank unless all describe the same variables in the same order.

    Args:
        described: this rank's list.
        what: name of the operation.
        ranks: ascending world ranks that call it; all by default.

    Raises:
        CollectiveMismatchError: names the first difference and the rank.
        CollectiveTimeoutError: not every rank called.
    """
    control = world.current().control
    if control is None:
        return
    ranks = list(world.current().everyone.ranks if ranks is None else ranks)
    lists = control.exchange(f"{what} on ranks {ranks}", list(described), ranks=ranks, describe=what)
    for rank, other in zip(ranks, lists, strict=True):
        for place, (first, there) in enumerate(itertools.zip_longest(lists[0], other)):
            if first != there:
                raise CollectiveMismatchError(
                    "All ranks must hold the same variables in the same order. First difference, at position "
                    f"{place}: rank {ranks[0]} has {first or 'nothing'}, rank {rank} has "
                    f"{there or 'nothing'}. Build the same model and optimizer on every rank."
                )
