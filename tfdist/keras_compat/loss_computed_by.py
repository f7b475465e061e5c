"""A training step whose loss somebody else computes (`Model.compute_loss`, Keras >= 3.3)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def loss_computed_by(model: Any, compute: Callable[[Any, Any, Any, Any], Any]) -> Iterator[None]:
    """Inside, `model.compute_loss` is `compute`, stock or the user's own; for as long as a step is traced.

    Args:
        model: to be trained.
        compute: called with the model's own loss, a function of targets, outputs and sample weights, and with
            those of the step.
    """
    before = model.__dict__.get("compute_loss")  # the user's, on the instance
    original = model.compute_loss

    def compute_loss(
        x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, **rest: Any
    ) -> Any:
        def own(y: Any, y_pred: Any, sample_weight: Any) -> Any:
            return original(x=None, y=y, y_pred=y_pred, sample_weight=sample_weight, **rest)

        return compute(own, y, y_pred, sample_weight)

    model.__dict__["compute_loss"] = compute_loss
    try:
        yield
    finally:
        del model.__dict__["compute_loss"]
        if before is not None:
            model.__dict__["compute_loss"] = before
