"""XLA up to the update: the stock train step compiled, the optimizer's update made outside.

XLA cannot run a collective of another engine (Horovod: "Detected unsupported operations"; TensorFlow's own ring
would be compiled into a collective of one process). Where the user asked for XLA, `Model.train_step` (Keras >= 3.3)
is therefore compiled up to, but not including, the optimizer's update: the update is captured inside the compiled
function and made outside.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

_ATTRIBUTE = "_tfdist_compiled_step"


def compile_train_step(model: Any) -> None:
    """Has the stock train step of `model` run as one XLA program from now on, its update outside."""
    import keras

    model.__dict__[_ATTRIBUTE] = _CompiledStep(keras.Model.train_step.__wrapped__)


def forget_compiled_step(model: Any) -> None:
    """Has it run as Keras wrote it."""
    model.__dict__.pop(_ATTRIBUTE, None)


@contextlib.contextmanager
def without_compiled_step(model: Any) -> Iterator[None]:
    """Inside, as after `forget_compiled_step`."""
    compiled = model.__dict__.pop(_ATTRIBUTE, None)
    try:
        yield
    finally:
        if compiled is not None:
            model.__dict__[_ATTRIBUTE] = compiled


def split_train_step(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def train_step(self: Any, data: Any) -> Any:
        compiled: _CompiledStep | None = self.__dict__.get(_ATTRIBUTE)
        return compiled(self, data) if compiled is not None else original(self, data)

    train_step.__wrapped__ = original  # type: ignore[attr-defined]
    return train_step


class _CompiledStep:
    """The stock train step as one XLA program that returns gradients, followed by the update outside it."""

    def __init__(self, train_step: Callable[[Any, Any], Any]) -> None:
        self._train_step = train_step
        self._gradients: Any = None
        self._updates: list[tuple[Any, list[Any]]] = []

    def __call__(self, model: Any, data: Any) -> Any:
        import tensorflow as tf

        if self._gradients is None:

            def logs_and_gradients(data: Any) -> tuple[Any, list[list[Any]]]:
                with capture_updates() as updates:
                    logs = self._train_step(model, data)
                self._updates = [(optimizer, variables) for optimizer, _, variables in updates]
                return logs, [gradients for _, gradients, _ in updates]

            self._gradients = tf.function(
                tf.autograph.experimental.do_not_convert(logs_and_gradients),
                jit_compile=True,
                reduce_retracing=True,
            )
        logs, gradients = self._gradients(data)
        for (optimizer, variables), values in zip(self._updates, gradients, strict=True):
            optimizer.apply(values, variables)
        return logs


class _Capture(threading.local):
    updates: list[tuple[Any, list[Any], list[Any]]] | None = None


_capture = _Capture()


@contextlib.contextmanager
def capture_updates() -> Iterator[list[tuple[Any, list[Any], list[Any]]]]:
    """Inside, distributed optimizers record (optimizer, gradients, variables) instead of updating."""
    updates: list[tuple[Any, list[Any], list[Any]]] = []
    _capture.updates = updates
    try:
        yield updates
    finally:
        _capture.updates = None


def captured(optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any] | None) -> bool:
    """Records an update if a capture is open; tells the optimizer whether to stop there."""
    if _capture.updates is None:
        return False
    variables = optimizer._trainable_variables if variables is None else variables
    _capture.updates.append((optimizer, list(gradients), list(variables)))
    return True
