"""`stage`: says on which stage of a pipeline a layer belongs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import keras

T = TypeVar("T")
_PIN = "_tfdist_stage"


def stage(number: int) -> Callable[[T], T]:
    """Pins a layer to a stage of a pipeline; a decorator of a class, or called on an instance.

    The cut is the best of those that respect all pins. Without a pipeline nothing changes, nor do names and files;
    an instance that is loaded or cloned isn't pinned any more.

    Args:
        number: of the stage, 0-based.

    Returns:
        The decorator, which returns the layer.

    Raises:
        ValueError: `number` is no stage.
        TypeError: what is decorated is no layer.

    Example:
        >>> import keras, tfdist
        >>> @tfdist.pipeline.stage(1)
        ... class Head(keras.layers.Dense):
        ...     pass
        >>> hidden = tfdist.pipeline.stage(0)(keras.layers.Dense(64))
    """
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise ValueError(f"A stage is a whole number from 0 on; received {number!r}.")

    def pin(layer: T) -> T:
        if isinstance(layer, type) and issubclass(layer, keras.layers.Layer):
            setattr(layer, _PIN, number)
        elif isinstance(layer, keras.layers.Layer):
            layer.__dict__[_PIN] = number  # past Keras, which tracks attributes
        else:
            raise TypeError(
                f"tfdist.pipeline.stage pins a layer, a class or an instance; received {layer!r}."
            )
        return layer

    return pin


def pin_of(operation: Any) -> int | None:
    """The stage to which a layer is pinned."""
    found: int | None = getattr(operation, _PIN, None)
    return found
