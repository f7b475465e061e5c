"""`BroadcastGlobalVariablesCallback`: every rank starts training from the root's state.

It acts before the first step. (Horovod's acts after it, because optimizers used to have no variables earlier;
so each rank makes one step from weights of its own.) A model that is built when training begins, the usual
case in Keras 3, is broadcast right then; for any other, tfdist's hook on Keras builds model and optimizer
without consuming data just before the first step, and it is broadcast there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import fit_hook, world
from tfdist.optimizer import broadcast_state


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Gives every rank the root's weights and optimizer state at the start of each `fit()`.

    Optimizer state is slots, iterations, learning rate and loss scale. Random states (dropout, augmentation)
    become the root's plus a rank's offset: reproducible, but another mask on every rank. All ranks must use
    the callback; with one rank it does nothing.

    Args:
        root_rank: the rank whose state all get.
        device: where to run the collectives, such as "/cpu:0"; "" for TensorFlow's choice.
        local_variables: variables that keep their own value on each rank.

    Raises:
        CollectiveMismatchError: at the start of `fit()`, if ranks hold different models.

    Example:
        >>> import keras, numpy as np, tfdist
        >>> tfdist.init()
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile(tfdist.DistributedOptimizer("sgd"), "mse")
        >>> start = tfdist.callbacks.BroadcastGlobalVariablesCallback(0)
        >>> _ = model.fit(np.ones((4, 2)), np.ones((4, 1)), callbacks=[start], verbose=0)
    """

    def __init__(
        self, root_rank: int = 0, device: str = "", local_variables: Sequence[Any] | Any | None = None
    ) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        if local_variables is None:
            local_variables = ()
        self.local_variables = list(
            local_variables if isinstance(local_variables, Sequence) else [local_variables]
        )

    def register_local_var(self, variable: Any) -> None:
        """Lets `variable` keep its own value on each rank."""
        self.local_variables.append(variable)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if world.is_alone():
            return
        fit_hook.leave_local(self.model, self.local_variables)
        fit_hook.when_built(self.model, self._broadcast)

    def _broadcast(self, model: Any) -> None:
        with tf.device(self.device or None):
            broadcast_state(model, self.root_rank, skip=self.local_variables)
