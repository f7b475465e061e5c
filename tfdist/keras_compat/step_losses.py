"""The loss of a stock training step, for a part of its batch (Keras >= 3.3).

Problem: a model is called before its loss, and isn't told the targets, so it can't do its backward pass slice
by slice while it is being called.

Solution: `Model.train_step` tells what it was given while it runs, and `mean_loss_of` answers with the compiled
loss where that of the batch is the mean of those of its slices, by their rows.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

_MEANS = ("sum_over_batch_size", "mean")


class _Current(threading.local):
    step: tuple[Any, Any] | None = None


_current = _Current()


@contextlib.contextmanager
def telling(model: Any, data: Any) -> Iterator[None]:
    """Inside, `told` knows the data of this training step of `model`."""
    before, _current.step = _current.step, (model, data)
    try:
        yield
    finally:
        _current.step = before


def told(model: Any, inputs: Any) -> tuple[Any, Any] | None:
    """Targets and sample weights that belong to `inputs`, or None where they aren't known."""
    if _current.step is None or _current.step[0] is not model:
        return None
    x, y, weights = keras.utils.unpack_x_y_sample_weight(_current.step[1])
    own, given = keras.tree.flatten(inputs), keras.tree.flatten(x)
    if y is None or len(own) != len(given) or any(a is not b for a, b in zip(own, given, strict=True)):
        return None
    return y, weights


def mean_loss_of(model: Any, targets: Any, outputs: Any) -> Callable[[Any, Any, Any], Any] | None:
    """(targets, outputs, weights) -> compiled loss, not scaled for a strategy.

    Builds it, as the first step would, for `targets` and `outputs` like these.

    None where the loss of the whole batch isn't the mean of those of its slices by their rows, or can't be known:
    sums, means over sample weights, and own `train_step`, `compute_loss` or `Loss.__call__`.
    """
    from keras.src.losses import loss as loss_module

    compiled: Any = getattr(model, "_compile_loss", None)
    own = type(model).compute_loss is not keras.Model.compute_loss or "compute_loss" in vars(model)
    if compiled is None or own:
        return None
    if not compiled.built:
        compiled.build(
            targets, keras.tree.map_structure(lambda x: keras.KerasTensor(x.shape, x.dtype), outputs)
        )
    flat = getattr(compiled, "_flat_losses", None)
    if not flat:
        return None
    for each in flat:
        kind = type(each.loss)
        if not isinstance(each.loss, keras.losses.Loss) or kind.__call__ is not keras.losses.Loss.__call__:
            return None
        if each.loss.reduction not in _MEANS:
            return None
    unscale = getattr(loss_module, "unscale_loss_for_distribution", None)
    if unscale is None and tf.distribute.has_strategy():
        return None

    def loss(targets: Any, outputs: Any, weights: Any) -> Any:
        value = compiled(targets, outputs, weights)
        return value if unscale is None else unscale(value)

    return loss


def tell_train_step(model: Any) -> None:
    """Has the stock `train_step` of a model, class or instance, tell its data; leaves others alone."""
    if isinstance(model, type):
        kind: Any = model
        if not issubclass(kind, keras.Model) or kind.train_step is not keras.Model.train_step:
            return

        def train_step(self: Any, data: Any) -> Any:
            with telling(self, data):
                return super(kind, self).train_step(data)

        kind.train_step = train_step
    elif isinstance(model, keras.Model) and type(model).train_step is keras.Model.train_step:
        reference = weakref.ref(model)

        def train_step_of_instance(data: Any) -> Any:
            own: Any = reference()
            with telling(own, data):
                return type(own).train_step(own, data)

        model.__dict__["train_step"] = train_step_of_instance
