"""`recompute`: a layer whose activations are computed again in the backward pass, not kept."""

from __future__ import annotations

from typing import TypeVar

from tfdist.layers.decorating import decorate
from tfdist.layers.replay import replay

T = TypeVar("T")


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
    return decorate(layer, "recompute", replay)
