"""The loop of `Model.fit` (Keras >= 3.3): its ends, and what it calls in between.

A callback cannot be sure to be first or last in the user's list, and sees neither the end of a rank's data nor an
error. The list of callbacks itself, which `fit` calls at each of these points, can.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tfdist.keras_compat.hook import Hook, ReplicaHook

EVENTS = (
    "set_model", "on_train_begin", "on_epoch_begin", "on_test_begin", "on_test_end", "on_epoch_end", "on_train_end",
)  # fmt: skip
"""Methods of `keras.callbacks.CallbackList` that the hook sees."""


def announced_fit(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    @functools.wraps(original)
    def fit(self: Any, *args: Any, **options: Any) -> Any:
        return hook.fit(self, lambda: original(self, *args, **options))

    return fit


def announced_evaluate(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    @functools.wraps(original)
    def evaluate(self: Any, *args: Any, **options: Any) -> Any:
        if options.get("_use_cached_eval_dataset"):  # the validation of fit(), which its events announce
            return original(self, *args, **options)
        data = args[0] if args else options.get("x")
        return hook.evaluate(self, data, lambda: original(self, *args, **options))

    return evaluate


def announced_event(name: str, original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **options: Any) -> Any:
        return hook.event(name, self, (*args, *options.values()), lambda: original(self, *args, **options))

    return method


def announced_predict(original: Callable[..., Any], hook: ReplicaHook) -> Callable[..., Any]:
    @functools.wraps(original)
    def predict(self: Any, *args: Any, **options: Any) -> Any:
        return hook.predict(self, lambda: original(self, *args, **options))

    return predict
