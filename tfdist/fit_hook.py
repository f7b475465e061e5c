"""What tfdist does around every `fit()` of a world with several ranks: refuse, prepare, guard, explain.

`keras_compat` finds the places in Keras; this file decides what happens there. Callbacks that must act on a
built model before its first step register an action with `before_first_step`.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from tfdist import operations, world
from tfdist.errors import OutOfSyncError
from tfdist.gradients import GradientReducer
from tfdist.keras_compat import has_stock_train_step
from tfdist.optimizer import has_reduced, is_distributed

Action = Callable[[Any], None]
_actions: weakref.WeakKeyDictionary[Any, list[Action]] = weakref.WeakKeyDictionary()


class _Local(threading.local):
    allowed = False


_local = _Local()


@contextlib.contextmanager
def allow_local() -> Iterator[None]:
    """Inside, models may train without the other ranks; see `tfdist.local`."""
    before, _local.allowed = _local.allowed, True
    try:
        yield
    finally:
        _local.allowed = before


def before_first_step(model: Any, action: Action) -> None:
    """Has `action(model)` called before the next first step of `model`, when it and its optimizer are built."""
    _actions.setdefault(model, []).append(action)


class FitHook:
    """Implements `keras_compat.Hook`."""

    def __init__(self) -> None:
        self._told: set[str] = set()
        # Models whose train function has not been seen to reduce anything yet.
        self._unproven: weakref.WeakSet[Any] = weakref.WeakSet()
        self._steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def check(self, model: Any) -> None:
        """Refuses a model whose stock train step would update without the other ranks."""
        if _local.allowed:
            self._unproven.discard(model)
            return
        stock = has_stock_train_step(model)
        if stock and model.optimizer is not None and not is_distributed(model.optimizer):
            raise OutOfSyncError(_unwrapped(model))
        self._unproven.add(model)

    def before_first_step(self, model: Any) -> None:
        for action in _actions.pop(model, []):
            action(model)

    def step(self, model: Any, run: Callable[[], Any]) -> Any:
        here = world.current()
        if here.watchdog is None:
            return run()
        count = self._steps[model] = self._steps.get(model, 0) + 1
        reductions = GradientReducer.reductions
        what = f"train step {count} of model {model.name!r}"
        with here.watchdog.watch(what):
            try:
                result = run()
            except Exception as error:
                explained = operations.translate(error, waiting_for=what)
                if explained is error:
                    raise
                raise explained from error
        if model in self._unproven:
            if GradientReducer.reductions == reductions and not has_reduced(model.optimizer):
                raise OutOfSyncError(_bypassed(model))
            self._unproven.discard(model)
        return result

    def tell(self, message: str) -> None:
        if message not in self._told and world.rank() == 0:
            self._told.add(message)
            print(f"tfdist: {message}", flush=True)


def _unwrapped(model: Any) -> str:
    kind = type(model.optimizer).__name__
    return (
        f"Model {model.name!r} would train on each of the {world.size()} ranks alone, and the ranks would drift "
        f"apart: its optimizer is a plain {kind}. Compile it with tfdist.DistributedOptimizer({kind}(...)), "
        "load it with tfdist.load_model, or, if this rank shall train it alone, put fit() into "
        "`with tfdist.local():`."
    )


def _bypassed(model: Any) -> str:
    return (
        f"The train_step of {type(model).__name__} made a step without combining gradients over the "
        f"{world.size()} ranks. Update through a tfdist.DistributedOptimizer, or take gradients from a "
        "tfdist.DistributedGradientTape; if this rank shall train it alone, put fit() into "
        "`with tfdist.local():`."
    )
