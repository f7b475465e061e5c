"""The train function of every model: made without XLA around it, built before its first step, guarded.

What is not built yet creates its variables while the train step is traced, and TensorFlow then traces it twice.

`Model.make_train_function` (Keras >= 3.3): XLA cannot run a collective (see `compiled_step`), so the outer train
function is made without `jit_compile`. It runs inside a guard that names this rank's position to its peers and
explains errors, and its train step tells the ranks' shares of the batch to the reduction of gradients.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from tfdist.keras_compat.compiled_step import compile_train_step, forget_compiled_step, without_compiled_step
from tfdist.keras_compat.hook import Hook
from tfdist.keras_compat.replaced import replaced

# What the train function of a model was made for.
_terms: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def has_stock_train_step(model: Any) -> bool:
    """Whether the model's class leaves `train_step` to Keras."""
    import keras

    return type(model).train_step is keras.Model.train_step


def guarded_make_train_function(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def make_train_function(self: Any, force: bool = False) -> Any:
        terms = hook.terms()
        if self.train_function is not None and not force and _terms.get(self) == terms:
            return self.train_function
        hook.check(self)
        forget_compiled_step(self)
        compiles = self.jit_compile and not self.run_eagerly
        if compiles:
            _keep_xla_out_of_collectives(self, hook)
            self.jit_compile = False
        try:
            with _joint_train_step(self, hook):
                # There may be one from before `init`, from another world, or for this rank alone.
                original(self, force=True)
        finally:
            if compiles:
                self.jit_compile = True
        self.train_function = _guard(self, self.train_function, hook)
        _terms[self] = terms
        return self.train_function

    return make_train_function


def counted_make_train_function(original: Callable[..., Any], hook: Any) -> Callable[..., Any]:
    """Makes Keras's own, whose train step tells the hook which batch it is given."""

    def make_train_function(self: Any, force: bool = False) -> Any:
        if self.train_function is not None and not force and _terms.get(self) == hook.terms():
            return self.train_function
        hook.check(self)
        with _joint_train_step(self, hook):
            original(self, force=True)
        train_function = self.train_function

        def counted_train_function(iterator: Any) -> Any:
            with _joint_train_step(self, hook):
                return train_function(iterator)

        self.train_function = counted_train_function
        _terms[self] = hook.terms()
        return self.train_function

    return make_train_function


def forget_train_functions() -> None:
    """Has Keras make those of all models anew."""
    for model in list(_terms):
        model.train_function = None
        forget_compiled_step(model)
    _terms.clear()


def _keep_xla_out_of_collectives(model: Any, hook: Hook) -> None:
    if hook.keeps_xla_out(model):
        hook.tell("jit_compile: ranks communicate to compute the loss, so the train step runs without XLA.")
    elif has_stock_train_step(model):
        compile_train_step(model)
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
            hook.before_first_step(model, getattr(iterator, "element_spec", None))
            started = True
        with _joint_train_step(model, hook):
            return hook.step(model, lambda: train_function(iterator))

    return guarded_train_function


def _build(model: Any, iterator: Any) -> Any:
    """Builds model, losses, metrics and optimizer without consuming data.

    Returns:
        What to use in place of `iterator`.
    """
    optimizer = model.optimizer
    if not is_built(model):
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


def is_built(model: Any) -> bool:
    """Whether layers, and the losses and metrics of `compile`, have their variables."""
    parts = (model._compile_loss, model._compile_metrics)
    return all(layer.built for layer in model._flatten_layers()) and all(
        part is None or part.built for part in parts
    )


def _batch_spec(batch: Any) -> Any:
    import keras
    import tensorflow as tf

    return keras.tree.map_structure(
        lambda value: None if value is None else tf.TensorSpec.from_tensor(tf.convert_to_tensor(value)), batch
    )


@contextlib.contextmanager
def _joint_train_step(model: Any, hook: Hook) -> Iterator[None]:
    """Inside, `model.train_step`, stock or the user's own, tells the hook which batch it is given.

    Keras takes the method when it makes the train function (older versions when they trace it), so it is replaced
    on the instance for just these moments.
    """
    if getattr(model.__dict__.get("train_step"), "is_joint", False):
        yield
        return
    train_step = model.train_step

    def joint_train_step(data: Any) -> Any:
        with hook.joint_step(model, data):
            return train_step(data)

    joint_train_step.is_joint = True  # type: ignore[attr-defined]
    with replaced(model, {"train_step": joint_train_step}):
        yield


def idle_step(model: Any, hook: Hook, spec: Any) -> Callable[[], None]:
    """A function that takes part in one training step with a batch of zeros, which must count for nothing.

    Args:
        model: built, with a train function.
        hook: its `joint_step` is given None for the batch.
        spec: describes a batch: a structure of `tf.TensorSpec`; unknown lengths become 1.
    """
    import keras
    import tensorflow as tf

    batch = keras.tree.map_structure(_zeros, spec)

    def step() -> None:
        with without_compiled_step(model), hook.joint_step(model, None):
            model.train_step(batch)

    return step if model.run_eagerly else tf.function(step, autograph=False)


def _zeros(spec: Any) -> Any:
    import tensorflow as tf

    if isinstance(spec, tf.OptionalSpec):
        return None  # Keras hands on None where a batch has no such part
    if not isinstance(spec, tf.TensorSpec) or spec.shape.rank is None:
        raise TypeError(
            "A rank that has run out of data joins the others with a batch of zeros, which takes tensors of known "
            f"rank; the batch holds {spec}. Give all ranks the same number of batches, as tfdist.shard does."
        )
    return tf.zeros([length or 1 for length in spec.shape], spec.dtype)
