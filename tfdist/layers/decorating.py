"""Decorators that change how a layer's `call` runs, of a class or of an instance.

Problem: a wrapper around the layer would change names of classes, paths of variables and files.

Solution: only `call` is replaced, in the class or on the instance. The layer stays what it is, and its files are
those of the undecorated one.
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable
from typing import Any, TypeVar

import keras

from tfdist.keras_compat.replay_scopes import add_losses, is_symbolic
from tfdist.layers.replay import Replayed

T = TypeVar("T")
# (layer, call, args, kwargs) -> what came of it
Run = Callable[[Any, Callable[..., Any], Any, Any], Replayed]


class _Current(threading.local):
    """Decorator and layer of every `call` that is being run by a decorator, inner ones last."""

    running: tuple[tuple[str, Any], ...] = ()


_current = _Current()


def decorate(layer: T, decorator: str, run: Run) -> T:
    """Has `run` call the layer's `call`, wherever a gradient may be asked for; in place.

    Args:
        layer: a class or an instance.
        decorator: name of the decorator in `tfdist.layers`; a layer that has it already stays as it is.
        run: calls it.

    Returns:
        `layer`.

    Raises:
        TypeError: no layer.
    """
    if isinstance(layer, type) and issubclass(layer, keras.layers.Layer):
        _decorate_class(layer, decorator, run)
    elif isinstance(layer, keras.layers.Layer):
        if decorator not in _decorators_of(layer):
            # Past Keras's `__setattr__`, which tracks. There may be another decorator's on the instance.
            before = layer.__dict__.get("call")
            call = before.__func__ if before is not None else type(layer).call
            layer.__dict__["call"] = types.MethodType(_decorated(call, decorator, run), layer)
    else:
        raise TypeError(
            f"{decorator} takes a layer or model of Keras, a class or an instance; received {layer!r}."
        )
    return layer


def is_recorded() -> bool:
    """Whether a gradient tape may see what is computed here."""
    from tensorflow.python.eager import record

    return not is_symbolic() and bool(record.could_possibly_record())


def _decorated(call: Callable[..., Any], decorator: str, run: Run) -> Callable[..., Any]:
    @functools.wraps(call)
    def decorated_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_recorded() or any(name == decorator and self is each for name, each in _current.running):
            return call(self, *args, **kwargs)

        def plain_call(*args: Any, **kwargs: Any) -> Any:
            before, _current.running = _current.running, (*_current.running, (decorator, self))
            try:
                return call(self, *args, **kwargs)
            finally:
                _current.running = before

        outputs, losses = run(self, plain_call, args, kwargs)
        add_losses(self, losses)
        return outputs

    decorated_call._tfdist_decorators = _decorators(call) | {decorator}  # type: ignore[attr-defined]
    return decorated_call


def _decorators(call: Any) -> frozenset[str]:
    return getattr(call, "_tfdist_decorators", frozenset())


def _decorators_of(layer: Any) -> frozenset[str]:
    return _decorators(layer.call)


def _decorate_class(decorated: Any, decorator: str, run: Run) -> None:
    if "call" in decorated.__dict__:
        if decorator in _decorators_of(decorated):
            return
        call = decorated.call
    else:
        # Keras may put a base class in, as that of Functional models, so look it up when it is called.
        @functools.wraps(decorated.call)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return super(decorated, self).call(*args, **kwargs)

    original = decorated.__call__

    @functools.wraps(original)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        if decorator not in _decorators_of(self):
            raise ValueError(
                f"A subclass of a class with @tfdist.layers.{decorator} must say whether its own `call` has it, "
                f"too; received {type(self).__name__}, which overrides the `call` of {decorated.__name__}. Put "
                f"@tfdist.layers.{decorator} on {type(self).__name__}."
            )
        return original(self, *args, **kwargs)

    decorated.call = _decorated(call, decorator, run)
    decorated.__call__ = __call__
