"""Everything in tfdist that reaches into Keras; nothing is changed at import, all of it is undone again.

`install` is called by `tfdist.init()` in a world of several ranks and `uninstall` by `tfdist.shutdown()`. An
optimizer never sees its model, so what depends on the model is hooked here, once:

1. `Model.make_train_function` (Keras >= 3.3): XLA cannot run a collective of another engine (Horovod:
   "Detected unsupported operations"; TensorFlow's own ring would be compiled into a collective of one
   process). The outer train function is therefore made without `jit_compile`, and it runs inside a guard that
   names this rank's position to its peers and explains errors.
2. `Model.train_step` (Keras >= 3.3): where the user asked for XLA, the stock step is compiled up to, but not
   including, the optimizer's update: the update is captured inside the compiled function and made outside.
3. `LossScaleOptimizer.apply` (Keras >= 3.0): it tests this rank's own gradients for finiteness and puts the
   inner `apply` into a `cond`. A reduction inside that cond would hang the world as soon as one rank
   overflows, so gradients are reduced before the test, and all ranks take the same branch.

tests/test_keras_compat.py fails once Keras mends one of these itself.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol


class Hook(Protocol):
    """What tfdist does around Keras's training; implemented in `tfdist.fit_hook`."""

    def check(self, model: Any) -> None:
        """Refuses a model that would train out of sync; called when its train function is made."""

    def before_first_step(self, model: Any) -> None:
        """Called once per train function, with the model and its optimizer built."""

    def step(self, model: Any, run: Callable[[], Any]) -> Any:
        """Runs one call of the train function."""

    def tell(self, message: str) -> None:
        """Says something to the user, once."""


_originals: list[tuple[Any, str, Any]] = []
_INHERITED = object()
_COMPILED_STEP = "_tfdist_compiled_step"


def install(hook: Hook) -> None:
    """Puts the three hooks in place; does nothing when they already are."""
    if _originals:
        return
    import keras

    model, loss_scale = keras.Model, keras.optimizers.LossScaleOptimizer
    _patch(model, "make_train_function", _guarded_make_train_function(model.make_train_function, hook))
    _patch(model, "train_step", _split_train_step(model.train_step))
    _patch(loss_scale, "apply", _reduce_before_finiteness(loss_scale.apply))


def uninstall() -> None:
    """Restores Keras as it was."""
    while _originals:
        owner, name, original = _originals.pop()
        if original is _INHERITED:
            delattr(owner, name)
        else:
            setattr(owner, name, original)


def has_stock_train_step(model: Any) -> bool:
    """Whether the model's class leaves `train_step` to Keras."""
    import keras

    return type(model).train_step is keras.Model.train_step


def _patch(owner: type, name: str, replacement: Callable[..., Any]) -> None:
    _originals.append((owner, name, owner.__dict__.get(name, _INHERITED)))
    setattr(owner, name, replacement)


# --- 1. the train function --------------------------------------------------------------------------------


def _guarded_make_train_function(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def make_train_function(self: Any, force: bool = False) -> Any:
        if self.train_function is not None and not force:
            return self.train_function
        hook.check(self)
        self.__dict__.pop(_COMPILED_STEP, None)
        if self.jit_compile and not self.run_eagerly:
            _keep_xla_out_of_collectives(self, hook)
            self.jit_compile = False
            try:
                original(self, force=force)
            finally:
                self.jit_compile = True
        else:
            original(self, force=force)
        self.train_function = _guard(self, self.train_function, hook)
        return self.train_function

    return make_train_function


def _keep_xla_out_of_collectives(model: Any, hook: Hook) -> None:
    import keras

    if has_stock_train_step(model):
        model.__dict__[_COMPILED_STEP] = _CompiledStep(keras.Model.train_step.__wrapped__)
        hook.tell(
            "jit_compile: XLA compiles forward pass, loss and gradients; the reduction over ranks and the "
            "optimizer's update run outside it."
        )
    else:
        hook.tell(
            f"jit_compile: {type(model).__name__} overrides train_step, and XLA cannot run the reduction over "
            "ranks inside it, so its train step runs without XLA. To compile the costly part, put it into a "
            "tf.function(jit_compile=True) inside train_step and apply the gradients outside of that."
        )


def _guard(model: Any, train_function: Callable[[Any], Any], hook: Hook) -> Callable[[Any], Any]:
    started = False

    def guarded_train_function(iterator: Any) -> Any:
        nonlocal started
        if not started:
            iterator = _build(model, iterator)
            hook.before_first_step(model)
            started = True
        return hook.step(model, lambda: train_function(iterator))

    return guarded_train_function


def _build(model: Any, iterator: Any) -> Any:
    """Builds model and optimizer without consuming data; returns an iterator to use in place of `iterator`."""
    optimizer = model.optimizer
    if not all(layer.built for layer in model._flatten_layers()):
        spec = getattr(iterator, "element_spec", None)
        if spec is None:
            # `train_on_batch` hands over a generator with one batch: look at it and put it back.
            batch = next(iterator)
            iterator = itertools.chain([batch], iterator)
            spec = _batch_spec(batch)
        model._symbolic_build(data_batch=spec)
    # An own train_step may give each of several optimizers its part of the variables; only it knows which.
    if (
        has_stock_train_step(model)
        and optimizer is not None
        and not optimizer.built
        and model.trainable_variables
    ):
        optimizer.build(model.trainable_variables)
    return iterator


def _batch_spec(batch: Any) -> Any:
    import keras
    import tensorflow as tf

    return keras.tree.map_structure(
        lambda value: None if value is None else tf.TensorSpec.from_tensor(tf.convert_to_tensor(value)), batch
    )


# --- 2. XLA up to the update ------------------------------------------------------------------------------


def _split_train_step(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def train_step(self: Any, data: Any) -> Any:
        compiled: _CompiledStep | None = self.__dict__.get(_COMPILED_STEP)
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


# --- 3. loss scaling --------------------------------------------------------------------------------------


def _reduce_before_finiteness(original: Callable[..., Any]) -> Callable[..., Any]:
    def apply(self: Any, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
        distributed = _distributed(self.inner_optimizer)
        if distributed is None:
            return original(self, grads, trainable_variables)
        if captured(self, grads, trainable_variables):
            return None
        return distributed.update_through(
            self, grads, trainable_variables, lambda reduced, variables: original(self, reduced, variables)
        )

    return apply


def _distributed(optimizer: Any) -> Any:
    """`optimizer` if it is a tfdist wrapper, which knows how to update through another optimizer."""
    method = getattr(type(optimizer), "update_through", None)
    return optimizer if isinstance(method, types.FunctionType) else None
