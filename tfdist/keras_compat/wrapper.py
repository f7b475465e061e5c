"""Finds tfdist's wrapper, which is made in a higher layer, around or inside a Keras optimizer."""

from __future__ import annotations

import types
from typing import Any


def wrapper_of(optimizer: Any) -> Any:
    """The `DistributedOptimizer` that `optimizer` is, or that a LossScaleOptimizer is around; None without one."""
    import keras

    if isinstance(getattr(type(optimizer), "update_through", None), types.FunctionType):
        return optimizer
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return wrapper_of(optimizer.inner_optimizer)
    return None
