"""What tfdist does around Keras's training, as seen from Keras; implemented in `tfdist.fit_hook`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol


class Hook(Protocol):
    """The events of training, in the order in which they occur."""

    def fit(self, model: Any, run: Callable[[], Any]) -> Any:
        """Runs one `fit()` of `model`."""

    def evaluate(self, model: Any, data: Any, run: Callable[[], Any]) -> Any:
        """Runs one `evaluate(data)` of `model`, unless it is the validation of `fit()`."""

    def terms(self) -> Any:
        """Equal whenever a train function that was made earlier is still right."""

    def check(self, model: Any) -> None:
        """Refuses a model that would train out of sync; called when its train function is made."""

    def event(self, name: str, callbacks: Any, arguments: tuple[Any, ...], run: Callable[[], Any]) -> Any:
        """Runs the method `name` of a CallbackList, such as `on_epoch_end`; `arguments` are those passed to it."""

    def before_first_step(self, model: Any, spec: Any) -> None:
        """Called once per train function, with model and optimizer built; `spec` describes a batch, or is None."""

    def step(self, model: Any, run: Callable[[], Any]) -> Any:
        """Runs one call of the train function."""

    def joint_step(self, model: Any, data: Any) -> contextlib.AbstractContextManager[None]:
        """Entered around `train_step(data)`, while it is traced or run eagerly."""

    def keeps_xla_out(self, model: Any) -> bool:
        """Whether ranks communicate within the forward pass or the loss of `model`, which XLA can't."""

    def tell(self, message: str) -> None:
        """Says something to the user, once."""


class ReplicaHook(Hook, Protocol):
    """What else there is where replicas are those of a `tf.distribute.Strategy`."""

    def predict(self, model: Any, run: Callable[[], Any]) -> Any:
        """Runs one `predict()` of `model`."""

    def distribute(self, strategy: Any, dataset: Any) -> tuple[Any, int]:
        """The distributed dataset, and how many elements of `dataset` make one of its steps."""
