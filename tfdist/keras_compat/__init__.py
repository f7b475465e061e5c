"""Everything in tfdist that reaches into Keras; nothing is changed at import, all of it is undone again.

`install` is called by `tfdist.init()` in a world of several ranks and `uninstall` by `tfdist.shutdown()`. An
optimizer never sees its model, so what depends on the model is hooked here, once. Each file explains one place:
`train_function`, `compiled_step`, `loss_computed_by`, `loss_scale`, `partial_optimizer`, `fit_loop`, `saving`, and,
for models on parameter servers, `placed_models`, `scheduled_steps`, `kept_back`.

tests/test_keras_compat.py fails once Keras mends one of these itself.
"""

from __future__ import annotations

from typing import Any

from tfdist.keras_compat import fit_loop, placed_models, replicas, saving
from tfdist.keras_compat.compiled_step import capture_updates, captured, split_train_step
from tfdist.keras_compat.hook import Hook, ReplicaHook
from tfdist.keras_compat.kept_back import KeptBack, ReadTwice
from tfdist.keras_compat.loss_computed_by import loss_computed_by
from tfdist.keras_compat.loss_scale import (
    load_through_wrapper,
    reduce_before_finiteness,
    save_through_wrapper,
)
from tfdist.keras_compat.one_device import copy_of, on_one_device, plain_variables, without_strategy
from tfdist.keras_compat.partial_optimizer import (
    build_partially,
    clipping_by,
    innermost,
    kept_here,
    loss_scaler,
    slots_per_weight,
    stand_in,
    unbuild,
)
from tfdist.keras_compat.replica_state import noted_statistics, noting_statistics
from tfdist.keras_compat.replica_weights import replica_weight, weighing_by
from tfdist.keras_compat.replicas import is_slot
from tfdist.keras_compat.saving import atomic_saves, only_take_part
from tfdist.keras_compat.scheduled_steps import (
    fit_on_other_data,
    scheduled_make_train_function,
)
from tfdist.keras_compat.train_function import (
    counted_make_train_function,
    forget_train_functions,
    guarded_make_train_function,
    has_stock_train_step,
    idle_step,
)
from tfdist.keras_compat.wrapper import wrapper_of

__all__ = [
    "Hook",
    "KeptBack",
    "ReadTwice",
    "ReplicaHook",
    "atomic_saves",
    "build_partially",
    "capture_updates",
    "captured",
    "clipping_by",
    "copy_of",
    "has_stock_train_step",
    "idle_step",
    "innermost",
    "install",
    "install_asynchronous",
    "install_for_one_rank",
    "install_for_replicas",
    "is_slot",
    "kept_here",
    "loss_computed_by",
    "loss_scaler",
    "noted_statistics",
    "noting_statistics",
    "on_one_device",
    "only_take_part",
    "plain_variables",
    "replica_weight",
    "slots_per_weight",
    "stand_in",
    "unbuild",
    "uninstall",
    "weighing_by",
    "without_strategy",
    "wrapper_of",
]

_originals: list[tuple[Any, str, Any]] = []
_INHERITED = object()


def install(hook: Hook) -> None:
    """Puts the hooks in place; does nothing when they already are."""
    if _originals:
        return
    import keras

    model = keras.Model
    _patch(model, "make_train_function", guarded_make_train_function(model.make_train_function, hook))
    _patch(model, "train_step", split_train_step(model.train_step))
    _patch(model, "fit", fit_loop.announced_fit(model.fit, hook))
    _patch(model, "evaluate", fit_loop.announced_evaluate(model.evaluate, hook))
    _patch_rest(hook)


def install_for_one_rank(hook: Any) -> None:
    """Puts in place what accumulated passes need in a world of one rank: `tfdist.last_windows.OneRankHook`."""
    if _originals:
        return
    import keras

    make, callbacks = keras.Model.make_train_function, keras.callbacks.CallbackList
    _patch(keras.Model, "make_train_function", counted_make_train_function(make, hook))
    for name in ("on_train_begin", "on_test_begin", "on_epoch_end"):
        _patch(callbacks, name, fit_loop.announced_event(name, getattr(callbacks, name), hook))


def install_asynchronous(hook: Any, distribution: Any) -> None:
    """Puts in place what models on parameter servers need, in the process that calls `fit`.

    Args:
        hook: a `tfdist.asynchronous.fit_hook.AsynchronousHook`.
        distribution: the `ParameterServerStrategy` in whose scope models are made.
    """
    if _originals:
        return
    import keras

    model = keras.Model

    _patch(
        model,
        "make_train_function",
        scheduled_make_train_function(model.make_train_function, hook.make_train_function),
    )
    # Where it is defined: `load_model` does not compile a model whose class seems to have a `compile` of its own.
    trainer = _owner(model, "compile")
    _patch(trainer, "compile", placed_models.refuse_outside(trainer.compile, hook.check_scope))
    _patch(
        model,
        "_maybe_symbolic_build",
        placed_models.build_from_description(model._maybe_symbolic_build, distribution, hook.describe),
    )
    inherited = vars(_owner(model, "distribute_strategy"))["distribute_strategy"]
    _patch(model, "distribute_strategy", placed_models.local_strategy(inherited, distribution))
    _patch(model, "fit", fit_loop.announced_fit(fit_on_other_data(model.fit, hook.replace_data), hook))
    _patch_rest(hook)


def _patch_rest(hook: Any) -> None:
    """Callbacks, loss scaling and files, which are the same wherever steps are made."""
    import keras

    model, loss_scale = keras.Model, keras.optimizers.LossScaleOptimizer
    callbacks = keras.callbacks.CallbackList
    for name in fit_loop.EVENTS:
        _patch(callbacks, name, fit_loop.announced_event(name, getattr(callbacks, name), hook))
    _patch(loss_scale, "apply", reduce_before_finiteness(loss_scale.apply))
    _patch(loss_scale, "save_own_variables", save_through_wrapper(loss_scale.save_own_variables))
    _patch(loss_scale, "load_own_variables", load_through_wrapper(loss_scale.load_own_variables))
    backup = keras.callbacks.BackupAndRestore
    _patch(model, "save", saving.atomic_method(model.save))
    _patch(model, "save_weights", saving.atomic_method(model.save_weights))
    _patch(backup, "_save_model", saving.recorded_backup(backup._save_model))
    _patch(backup, "on_train_begin", saving.consistent_restore(backup.on_train_begin))


def install_for_replicas(hook: ReplicaHook) -> None:
    """As `install`, and what replicas of a `tf.distribute.Strategy` need."""
    if _originals:
        return
    install(hook)
    for owner, name, replacement in replicas.patches(hook):
        _patch(owner, name, replacement)


def _owner(model: type, name: str) -> Any:
    """The class that defines an attribute of `model`."""
    return next(cls for cls in model.__mro__ if name in cls.__dict__)


def uninstall() -> None:
    """Restores Keras as it was."""
    while _originals:
        owner, name, original = _originals.pop()
        if original is _INHERITED:
            delattr(owner, name)
        else:
            setattr(owner, name, original)
    forget_train_functions()


def _patch(owner: Any, name: str, replacement: Any) -> None:
    _originals.append((owner, name, owner.__dict__.get(name, _INHERITED)))
    setattr(owner, name, replacement)
