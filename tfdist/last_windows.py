"""Accumulated passes in `fit()` where no other rank must be asked: weighed by samples, and closed after each epoch.

Several ranks do it in their session (`fit_session`). One rank, and replicas that `tf.distribute` places, only need
to know a batch's samples, and where the training of an epoch ends: before validation, if there is any.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

from tfdist import fit_hook, joint_step


class LastWindows:
    """The optimizers that accumulate passes, by model."""

    def __init__(self) -> None:
        self._windows: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
        self._of_fit: weakref.WeakSet[Any] = weakref.WeakSet()

    def of(self, model: Any) -> list[Any]:
        """Those of one model, in the order in which its train step uses them."""
        return self._windows.setdefault(model, [])

    def event(self, name: str, callbacks: Any) -> None:
        """Closes windows before the method `name` of a CallbackList, if it is one that follows training."""
        if name == "on_train_begin":
            self._of_fit.add(callbacks)
        elif name in ("on_test_begin", "on_epoch_end") and callbacks in self._of_fit:
            for each in self.of(callbacks.model):
                each.close_window(each.passes_held)


class OneRankHook:
    """Implements those parts of `keras_compat.Hook` that a world of one rank needs."""

    def __init__(self) -> None:
        self._windows = LastWindows()

    def terms(self) -> Any:
        return self

    def check(self, model: Any) -> None:
        self._windows.of(model).clear()

    def event(self, name: str, callbacks: Any, arguments: tuple[Any, ...], run: Callable[[], Any]) -> Any:
        self._windows.event(name, callbacks)
        return run()

    def joint_step(self, model: Any, data: Any) -> contextlib.AbstractContextManager[None]:
        return joint_step.counting(lambda: fit_hook.samples(data), self._windows.of(model))
