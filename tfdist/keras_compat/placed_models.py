"""Models whose variables are on parameter servers (Keras >= 3.3, TensorFlow's ParameterServerStrategy).

A model that was made in the scope of a `tf.distribute.Strategy` remembers it, and has it run every function. This
one can run functions on workers only, through its coordinator; so `evaluate` and `predict` fail ("must be used with
ClusterCoordinator"), data are not iterated, and `fit` crashes in the symbolic build, which reads a batch.

Mended: such a model runs its functions in the process that calls it, as a model that was made outside of any scope.
It reads its variables from the servers. What is not built yet is built in the scope, from the description of
a batch, without reading one. `compile` refuses a model from outside of the scope.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tfdist.errors import TfdistError
from tfdist.keras_compat.train_function import is_built

_Original = Callable[..., Any]


def local_strategy(original: Any, distribution: Any) -> property:
    """`Model.distribute_strategy`, which Keras asks to run functions and to distribute data."""

    def distribute_strategy(self: Any) -> Any:
        import tensorflow as tf

        own = original.fget(self)
        if own is not distribution:
            return own
        here = tf.distribute.get_strategy()
        if here is distribution:
            raise TfdistError(
                "Models are made in tfdist.scope() and used outside; received a call of fit(), evaluate() or "
                "predict() inside. End the `with tfdist.scope():` block before it."
            )
        return here

    return property(distribute_strategy)


def build_from_description(
    original: _Original, distribution: Any, describe: Callable[[Any, Any], Any]
) -> _Original:
    """`Model._maybe_symbolic_build`, which `fit` and `evaluate` call first.

    Args:
        original: Keras's own.
        distribution: in whose scope models were made.
        describe: gives for a model, and the description of what it iterates, that of a batch.
    """

    @functools.wraps(original)
    def _maybe_symbolic_build(self: Any, iterator: Any = None, data_batch: Any = None) -> None:
        if self._distribute_strategy is not distribution:
            original(self, iterator=iterator, data_batch=data_batch)
            return
        with distribution.scope():
            if not is_built(self):
                if iterator is not None:
                    data_batch = describe(self, iterator._distributed_dataset.element_spec)
                self._symbolic_build(data_batch=_without_options(data_batch))
            optimizer = getattr(self, "optimizer", None)
            if optimizer is not None and not optimizer.built and self.trainable_variables:
                optimizer.build(self.trainable_variables)

    return _maybe_symbolic_build


def refuse_outside(original: _Original, check: Callable[[Any], None]) -> _Original:
    """`Model.compile`, after `check(model)`."""

    @functools.wraps(original)
    def compile(self: Any, *args: Any, **options: Any) -> Any:
        check(self)
        return original(self, *args, **options)

    return compile


def _without_options(spec: Any) -> Any:
    """A batch's description with None for the parts that it does not have."""
    import keras
    import tensorflow as tf

    return keras.tree.map_structure(
        lambda part: None if isinstance(part, tf.OptionalSpec | tf.experimental.Optional) else part, spec
    )
