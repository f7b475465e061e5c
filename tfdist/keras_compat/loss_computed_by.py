"""A training step whose loss somebody else computes (`Model.compute_loss`, Keras >= 3.3)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from tfdist.keras_compat.replaced import replaced


@contextlib.contextmanager
def loss_computed_by(model: Any, compute: Callable[[Any, Any, Any, Any], Any]) -> Iterator[None]:
    """Inside, `model.compute_loss` is `compute`, stock or the user's own; for as long as a step is traced.

    Args:
        model: to be trained.
        compute: called with the model's own loss, a function of targets, outputs and sample weights, and with
            those of the step.
    """
    original = model.compute_loss

    def compute_loss(
        x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, **rest: Any
    ) -> Any:
        def own(y: Any, y_pred: Any, sample_weight: Any) -> Any:
            return original(x=None, y=y, y_pred=y_pred, sample_weight=sample_weight, **rest)

        return compute(own, y, y_pred, sample_weight)

    with replaced(model, {"compute_loss": compute_loss}):
        yield
