"""`recompute`: a layer whose activations are computed again in the backward pass, not kept.

Problem: a wrapper around the layer would change names of classes, paths of variables and files.

Solution: only `call` is replaced, in the class or on the instance. The layer stays what it is, and its files are
those of the undecorated one.
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable
from typing import Any, TypeVar

import keras

from tfdist.keras_compat.replay_scopes import is_symbolic
from tfdist.layers.replay import replay

T = TypeVar("T")

_MARK = "_tfdist_recomputes"


class _Current(threading.local):
    """The layers whose `call` is being run by `replay`, inner ones last."""

    layers: tuple[Any, ...] = ()


_current = _Current()


def recompute(layer: T) -> T:
    """Makes a layer compute its activations again in the backward pass, in place of keeping them.

    What is kept from the forward pass is the layer's inputs; so apply it to blocks of several layers. A network cut
    into √n blocks of √n layers needs the memory of about 2√n layers, for one more forward pass: a third more
    computation. `tfdist.layers.recompute_model` cuts a model by itself.

    Gradients, outputs, losses and state are those of the undecorated layer: random layers draw the same numbers
    again, state such as moving statistics is updated once, and `training`, masks, keyword arguments, losses and
    mixed precision are as in the first run. Without a gradient tape, as in `predict`, nothing changes. Inside a
    block, collectives of `SyncBatchNormalization` are not repeated.

    Names, variables and files (`.keras`, `.weights.h5`, SavedModel) are those of the undecorated layer. A decorated
    instance isn't decorated any more once it is loaded or cloned: decorate it again.

    Args:
        layer: a subclass of `keras.layers.Layer` or `keras.Model`, as a decorator; or an instance of any: a layer,
            a Functional, Sequential or subclassed model. It is changed in place.

    Returns:
        `layer`.

    Raises:
        TypeError: `layer` is neither.
        ValueError: when it is called under a tape: what it does can't be done again (raw `tf.random` operations,
            `tf.py_function`, a `tf.Variable` that Keras doesn't know, assignments inside a loop), or its class
            overrides the decorated `call`.

    Example:
        >>> import keras, tfdist
        >>> @tfdist.layers.recompute
        ... class Block(keras.layers.Layer):
        ...     def __init__(self, units):
        ...         super().__init__()
        ...         self.hidden = keras.layers.Dense(4 * units, activation="gelu")
        ...         self.out = keras.layers.Dense(units)
        ...     def call(self, x):
        ...         return x + self.out(self.hidden(x))
        >>> model = keras.Sequential([keras.Input((8,)), Block(8), Block(8), keras.layers.Dense(1)])
        >>> encoder = tfdist.layers.recompute(keras.Sequential([keras.layers.Dense(8), keras.layers.ReLU()]))

    Reference:
        Chen, Xu, Zhang, Guestrin 2016, "Training deep nets with sublinear memory cost".
    """
    if isinstance(layer, type) and issubclass(layer, keras.layers.Layer):
        _decorate_class(layer)
    elif isinstance(layer, keras.layers.Layer):
        if not _recomputes(layer):
            # Past Keras's `__setattr__`, which tracks.
            layer.__dict__["call"] = types.MethodType(recomputing(type(layer).call), layer)
    else:
        raise TypeError(
            f"recompute takes a layer or model of Keras, a class or an instance; received {layer!r}."
        )
    return layer


def recomputing(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call` of a layer, recomputed where a gradient may be asked for."""

    @functools.wraps(call)
    def recomputing_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_recorded() or any(self is layer for layer in _current.layers):
            return call(self, *args, **kwargs)

        def run(*args: Any, **kwargs: Any) -> Any:
            before, _current.layers = _current.layers, (*_current.layers, self)
            try:
                return call(self, *args, **kwargs)
            finally:
                _current.layers = before

        run = functools.wraps(call)(run)
        outputs, losses = replay(self, run, args, kwargs)
        for loss in losses:
            self.add_loss(loss)
        return outputs

    setattr(recomputing_call, _MARK, True)
    return recomputing_call


def is_recorded() -> bool:
    """Whether a gradient tape may see what is computed here."""
    from tensorflow.python.eager import record

    return not is_symbolic() and bool(record.could_possibly_record())


def _recomputes(layer: Any) -> bool:
    return hasattr(layer.call, _MARK)


def _decorate_class(decorated: Any) -> None:
    if "call" in decorated.__dict__:
        if _recomputes(decorated):
            return
        call = decorated.call
    else:
        # Keras may put a base class in, as that of Functional models, so look it up when it is called.
        @functools.wraps(decorated.call)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return super(decorated, self).call(*args, **kwargs)

    original = decorated.__call__

    @functools.wraps(original)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        if not _recomputes(self):
            raise ValueError(
                f"A subclass of a recomputed layer must say whether its own `call` is recomputed; received "
                f"{type(self).__name__}, which overrides the `call` of {decorated.__name__}. Put "
                f"@tfdist.layers.recompute on {type(self).__name__}, too."
            )
        return original(self, *args, **kwargs)

    decorated.call = recomputing(call)
    decorated.__call__ = __call__
