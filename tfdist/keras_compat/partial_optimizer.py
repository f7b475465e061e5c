"""A Keras optimizer that updates only some of a model's variables, and still behaves as one that updates all.

Problem: where each variable is updated by one rank (a parameter server), a rank's optimizer shall keep slots for
its own variables only. But Keras's files list slots by their position among those of all variables, and global
clipping needs the norm of all gradients.

Solution: an optimizer is built on all variables, with a stand-in of a few bytes for each that another rank
updates. So its variables have the same positions and names on all ranks, and in plain Keras. `_clip_gradients`
(Keras >= 3.3) is replaced, while a step is traced, by one that knows the norm of all ranks' gradients.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any


def stand_in(variable: Any, *, other: bool = False) -> Any:
    """A tiny variable of the same path, dtype and number of axes, but of another length along each of them.

    Args:
        variable: a `keras.Variable` or `tf.Variable`.
        other: whether to take yet other lengths.
    """
    import keras
    import numpy as np
    import tensorflow as tf

    lengths = [3 if other else 2 if length == 1 else 1 for length in variable.shape] or [2 if other else 1]
    path = str(getattr(variable, "path", None) or variable.name)
    with tf.init_scope():
        made = keras.Variable(
            np.zeros(lengths),
            dtype=keras.backend.standardize_dtype(variable.dtype),
            name=path.rsplit("/", 1)[-1].replace(":", "_"),
        )
    made._path = path
    made.overwrite_with_gradient = getattr(variable, "overwrite_with_gradient", False)
    return made


def build_partially(optimizer: Any, variables: Sequence[Any], stand_ins: Sequence[Any]) -> None:
    """Builds an optimizer, and marks those of its variables that only one rank keeps (see `kept_here`).

    Args:
        optimizer: not built.
        variables: each of the model's variables, or its stand-in.
        stand_ins: the stand-ins of all variables.
    """
    import tensorflow as tf

    # What changes its shape with the variables' belongs to one of them.
    twins = []
    with tf.init_scope():
        for tiny in (stand_ins, [stand_in(each, other=True) for each in stand_ins]):
            twin = type(optimizer).from_config(optimizer.get_config())
            twin.build(list(tiny))
            twins.append(twin.variables)
        optimizer.build(list(variables))
    for variable, one, other in zip(optimizer.variables, *twins, strict=True):
        if one.shape != other.shape:
            variable.tfdist_kept_here = variable.shape != one.shape


def unbuild(optimizer: Any) -> None:
    """Makes a built optimizer as it was before `build`, in place: others may hold it."""
    fresh = type(optimizer).from_config(optimizer.get_config())
    vars(optimizer).clear()
    vars(optimizer).update(vars(fresh))


def slots_per_weight(optimizer: Any) -> float:
    """Bytes that an optimizer will keep for a byte of weights: 2 for Adam, 1 for momentum.

    Args:
        optimizer: not built, of variables like its own dtype.
    """
    import keras
    import numpy as np
    import tensorflow as tf

    with tf.init_scope():
        weights = keras.Variable(np.zeros([64, 64], "float32"))
        twin = type(optimizer).from_config(optimizer.get_config())
        before = sum(int(np.prod(each.shape)) for each in twin.variables)
        twin.build([weights])
    return (sum(int(np.prod(each.shape)) for each in twin.variables) - before) // 64 / 64


def kept_here(variable: Any) -> bool | None:
    """Whether this rank keeps a slot, or has a stand-in for it; None for what all ranks have alike."""
    kept: bool | None = getattr(variable, "tfdist_kept_here", None)
    return kept


def innermost(optimizer: Any, *, until: type | tuple[type, ...] = ()) -> list[Any]:
    """The optimizers that update variables, or those of class `until` on the way to them.

    Keras nests optimizers in two ways: `LossScaleOptimizer.inner_optimizer`, `MultiOptimizer.optimizers`.
    """
    if isinstance(optimizer, until):
        return [optimizer]
    parts = getattr(optimizer, "optimizers", None)
    if isinstance(parts, list | tuple) and parts:
        return [inner for part in parts for inner in innermost(part, until=until)]
    inner = getattr(optimizer, "inner_optimizer", None)
    return [optimizer] if inner is None else innermost(inner, until=until)


def loss_scaler(optimizer: Any) -> Any:
    """What skips steps whose gradients are not finite: the LossScaleOptimizer that this is or contains, or None."""
    import keras

    while optimizer is not None and not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = getattr(optimizer, "inner_optimizer", None)
    return optimizer


@contextlib.contextmanager
def clipping_by(optimizer: Any, clip: Callable[..., list[Any]]) -> Iterator[None]:
    """Inside, `global_clipnorm` clips by `clip(gradients, limit=global_clipnorm)`."""
    clipped = [each for each in innermost(optimizer) if each.global_clipnorm and not each.clipnorm]
    for each in clipped:
        each.__dict__["_clip_gradients"] = functools.partial(clip, limit=each.global_clipnorm)
    try:
        yield
    finally:
        for each in clipped:
            del each.__dict__["_clip_gradients"]
