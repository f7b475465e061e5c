"""A `LossScaleOptimizer` around tfdist's wrapper (Keras >= 3.0).

`apply` tests this rank's own gradients for finiteness and puts the inner `apply` into a `cond`. A reduction inside
that cond would hang the world as soon as one rank overflows, so gradients are reduced before the test, and all
ranks take the same branch.

`save_own_variables` and `load_own_variables` would miss what the wrapper does where ranks divide the optimizer's
slots among them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tfdist.keras_compat.compiled_step import captured
from tfdist.keras_compat.wrapper import wrapper_of

_Original = Callable[..., Any]


def reduce_before_finiteness(original: _Original) -> _Original:
    def apply(self: Any, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
        distributed = wrapper_of(self.inner_optimizer)
        if distributed is None:
            return original(self, grads, trainable_variables)
        if captured(self, grads, trainable_variables):
            return None
        return distributed.update_through(
            self, grads, trainable_variables, lambda reduced, variables: original(self, reduced, variables)
        )

    return apply


def save_through_wrapper(original: _Original) -> _Original:
    def save_own_variables(self: Any, store: Any) -> None:
        distributed = wrapper_of(self.inner_optimizer)
        if distributed is None:
            original(self, store)
        else:
            distributed.save_through(self, store, lambda store: original(self, store))

    return save_own_variables


def load_through_wrapper(original: _Original) -> _Original:
    def load_own_variables(self: Any, store: Any) -> None:
        distributed = wrapper_of(self.inner_optimizer)
        if distributed is None:
            original(self, store)
        else:
            distributed.load_through(self, store, lambda store: original(self, store))

    return load_own_variables
