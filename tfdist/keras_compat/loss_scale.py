"""Reduction before the finiteness test of `LossScaleOptimizer.apply` (Keras >= 3.0).

It tests this rank's own gradients for finiteness and puts the inner `apply` into a `cond`. A reduction inside
that cond would hang the world as soon as one rank overflows, so gradients are reduced before the test, and all
ranks take the same branch.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

from tfdist.keras_compat.compiled_step import captured


def reduce_before_finiteness(original: Callable[..., Any]) -> Callable[..., Any]:
    def apply(self: Any, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
        distributed = _distributed(self.inner_optimizer)
        if distributed is None:
            return original(self, grads, trainable_variables)
        if captured(self, grads, trainable_variables):
            return None
        return distributed.update_through(
            self, grads, trainable_variables, lambda reduced, variables: original(self, reduced, variables)
        )

    return apply


def _distributed(optimizer: Any) -> Any:
    """`optimizer` if it is a tfdist wrapper, which knows how to update through another optimizer."""
    method = getattr(type(optimizer), "update_through", None)
    return optimizer if isinstance(method, types.FunctionType) else None
