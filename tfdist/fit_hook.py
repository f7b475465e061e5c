"""What tfdist does around every `fit()` of a world with several ranks: refuse, prepare, guard, agree, explain.

`keras_compat` finds the places in Keras; this file decides what happens there. Callbacks that must act on a
built model before its first step register an action with `when_built`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import inference, joint_step, keras_compat, metric_merging, operations, world
from tfdist.callback_roles import runs_on_first_rank_only, saves_model
from tfdist.errors import OutOfSyncError
from tfdist.fit_session import FitSession
from tfdist.gradients import GradientReducer
from tfdist.joint_step import JointSteps
from tfdist.keras_compat import has_stock_train_step
from tfdist.metric_merging import Measured
from tfdist.optimizer import (
    broadcast_state,
    divides_state,
    has_reduced,
    is_distributed,
    local_variables,
    ranks_of,
    served_loss,
)
from tfdist.variables import (
    MOVING_STATISTICS,
    agree_on_list,
    describe,
    differing_variables,
    model_state,
)

Action = Callable[[Any], None]
_actions: weakref.WeakKeyDictionary[Any, list[Action]] = weakref.WeakKeyDictionary()
_left_local: weakref.WeakKeyDictionary[Any, set[int]] = weakref.WeakKeyDictionary()
_sessions: weakref.WeakKeyDictionary[Any, FitSession] = weakref.WeakKeyDictionary()


def when_built(model: Any, action: Action) -> None:
    """Calls `action(model)`: now, or if `model` is not built yet, before its next first step."""
    if all(layer.built for layer in model._flatten_layers()):
        action(model)
    else:
        _actions.setdefault(model, []).append(action)


def act_on_built(model: Any) -> None:
    """Calls the actions that have waited until `model` is built."""
    for action in _actions.pop(model, []):
        action(model)


def leave_local(model: Any, variables: Sequence[Any]) -> None:
    """Lets these variables of `model` differ between ranks when training starts."""
    _left_local.setdefault(model, set()).update(id(variable) for variable in variables)


def common_state(model: Any, *, ignore: Sequence[str]) -> list[Any]:
    """Weights and optimizer state that must be equal on all ranks.

    Args:
        model: a built model.
        ignore: last path components of weights to leave out.
    """
    left = _left_local.get(model, set()) | local_variables(model.optimizer)
    return [each for each in model_state(model, ignore=ignore) if id(each) not in left]


def merges_logs(model: Any) -> bool:
    """Whether `model` is in a `fit()` whose logs are those of all ranks' data."""
    return world.current().is_placed or model in _sessions


class StepGuard:
    """What holds for the steps of every strategy whose ranks all run the script: refused, bounded, proved."""

    def __init__(self) -> None:
        self._told: set[str] = set()
        # Models whose train function has not been seen to reduce anything yet.
        self._unproven: weakref.WeakSet[Any] = weakref.WeakSet()

    def terms(self) -> Any:
        return self, joint_step.is_alone()

    def check(self, model: Any) -> None:
        """Refuses a model whose stock train step would update without the other ranks."""
        if joint_step.is_alone():
            self._unproven.discard(model)
            return
        stock = has_stock_train_step(model)
        if stock and model.optimizer is not None and not is_distributed(model.optimizer):
            raise OutOfSyncError(_unwrapped(model))
        self._unproven.add(model)

    def tell(self, message: str) -> None:
        if message not in self._told and world.rank() == 0:
            self._told.add(message)
            print(f"tfdist: {message}", flush=True)

    def watched(self, what: str, run: Callable[[], Any], ranks: Sequence[int] | None = None) -> Any:
        """Runs something in which ranks, by default all, meet: bounded, with errors explained."""
        watchdog = world.current().watchdog
        if watchdog is None:
            return run()
        with watchdog.watch(what, ranks):
            try:
                return run()
            except Exception as error:
                explained = operations.translate(error, waiting_for=what)
                if explained is error:
                    raise
                raise explained from error

    def proved(self, model: Any, run: Callable[[], Any]) -> Any:
        """Runs a step; raises unless it, or one before, has reduced gradients."""
        reductions = GradientReducer.reductions
        result = run()
        if model in self._unproven:
            if GradientReducer.reductions == reductions and not has_reduced(model.optimizer):
                raise OutOfSyncError(_bypassed(model))
            self._unproven.discard(model)
        return result


class FitHook(StepGuard):
    """Implements `keras_compat.Hook`."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._steps: weakref.WeakKeyDictionary[Any, JointSteps] = weakref.WeakKeyDictionary()
        self._batches: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        # Models in an `evaluate` for all ranks, until their metrics are merged.
        self._evaluating: weakref.WeakSet[Any] = weakref.WeakSet()
        # What the training metrics of the running epoch came to, before validation overwrites them.
        self._trained: weakref.WeakKeyDictionary[Any, Measured] = weakref.WeakKeyDictionary()

    # Around fit().

    def fit(self, model: Any, run: Callable[[], Any]) -> Any:
        if joint_step.is_alone() or model in _sessions:
            return run()
        steps = self._steps_of(model)
        session = _sessions[model] = FitSession(
            model, steps, self._idle_step(model), functools.partial(self._guarded, model)
        )
        try:
            return run()
        except Exception as error:
            session.fail(error)
            for each in steps.windows:
                each.close_window(0, carries=False)  # dropped, on all ranks
            raise
        finally:
            del _sessions[model]
            steps.begin_epoch()  # `train_on_batch` must not find what stopped this fit()

    def evaluate(self, model: Any, data: Any, run: Callable[[], Any]) -> Any:
        if joint_step.is_alone() or not inference.is_joint(data):
            return run()
        self._evaluating.add(model)
        try:
            return run()
        except Exception as error:
            if model in self._evaluating:  # the others wait for what this rank has measured
                inference.tell_failure("evaluate", error)
            raise
        finally:
            self._evaluating.discard(model)

    def event(self, name: str, callbacks: Any, arguments: tuple[Any, ...], run: Callable[[], Any]) -> Any:
        model = arguments[0] if name == "set_model" else callbacks.model
        session = None if model is None else _sessions.get(model)
        of_fit = session is not None and session.callbacks is callbacks
        if name == "on_test_end" and not of_fit and model in self._evaluating:
            inference.merge_evaluation(model, arguments[0])
            self._evaluating.discard(model)
        if session is not None and session.callbacks is None:
            if name == "set_model":  # already then, TensorBoard writes the model's graph
                _leave_to_first_rank(session, model, callbacks)
                return run()
            if name == "on_train_begin":
                session.callbacks = callbacks
        if session is None or session.callbacks is not callbacks:
            return run()
        result: Any = getattr(self, f"_{name}")(session, callbacks.model, run, *arguments)
        return result

    def _on_train_begin(self, session: FitSession, model: Any, run: Callable[[], Any], *_: Any) -> None:
        session.begin(session.callbacks.params)
        _leave_to_first_rank(session, model, session.callbacks)
        run()
        resumed = session.begun(getattr(model, "_initial_epoch", None))
        if resumed is not None:
            if len(session.ranks) < world.size():
                raise OutOfSyncError(
                    f"BackupAndRestore resumes training on all {world.size()} ranks together, but model "
                    f"{model.name!r} trains on ranks {session.ranks} only. Load its weights there yourself."
                )
            model._initial_epoch = resumed
            when_built(model, broadcast_state)

    def _on_epoch_begin(self, session: FitSession, model: Any, run: Callable[[], Any], *_: Any) -> None:
        session.begin_epoch()
        run()

    def _on_test_begin(self, session: FitSession, model: Any, run: Callable[[], Any], *_: Any) -> None:
        session.finish_steps()
        self._trained[model] = metric_merging.measure(model, {})
        run()

    def _on_test_end(
        self, session: FitSession, model: Any, run: Callable[[], Any], logs: Any = None, *_: Any
    ) -> None:
        if logs is not None:
            self._merge(session, "validation", logs, metric_merging.measure(model, logs))
        run()

    def _on_epoch_end(
        self, session: FitSession, model: Any, run: Callable[[], Any], epoch: int, logs: Any = None, *_: Any
    ) -> None:
        session.finish_steps()
        logs = {} if logs is None else logs
        trained = self._trained.pop(model, None) or metric_merging.measure(model, {})
        own = {name: value for name, value in logs.items() if not name.startswith("val_")}
        mine = dataclasses.replace(trained, logs=metric_merging.numbers_in(own))
        self._merge(session, "training", logs, mine)
        run()
        session.decided(epoch)

    def _on_train_end(self, session: FitSession, model: Any, run: Callable[[], Any], *_: Any) -> None:
        run()
        session.end()

    def _merge(self, session: FitSession, part: str, logs: dict[str, Any], mine: Measured) -> None:
        for name in session.measured(part, logs, mine):
            self.tell(metric_merging.averaged_notice(name))

    def _idle_step(self, model: Any) -> Callable[[], None]:
        made: list[Callable[[], None]] = []

        def run() -> None:
            if not made:
                if model not in self._batches:
                    raise OutOfSyncError(
                        f"Rank {world.rank()} has no batch at all for model {model.name!r}, and joins the other "
                        "ranks only if it knows how a batch looks. Give it a tf.data.Dataset, or at least one "
                        "sample."
                    )
                made.append(keras_compat.idle_step(model, self, self._batches[model]))
            self._guarded(model, made[0])

        return run

    # Around a step.

    def check(self, model: Any) -> None:
        super().check(model)
        self._steps_of(model).windows.clear()

    def before_first_step(self, model: Any, spec: Any) -> None:
        if spec is not None:
            self._batches[model] = spec
        act_on_built(model)
        if not joint_step.is_alone():
            require_equal_start(model)

    @contextlib.contextmanager
    def joint_step(self, model: Any, data: Any) -> Iterator[None]:
        if joint_step.is_alone():
            yield
            return
        with self._steps_of(model).step(None if data is None else samples(data)), self._loss_of_all(model):
            yield

    def keeps_xla_out(self, model: Any) -> bool:
        return model.optimizer is not None and served_loss(model.optimizer) is not None

    def _loss_of_all(self, model: Any) -> contextlib.AbstractContextManager[None]:
        served = None if model.optimizer is None else served_loss(model.optimizer)
        if served is None:
            return contextlib.nullcontext()
        return keras_compat.loss_computed_by(model, functools.partial(served, model))

    def _steps_of(self, model: Any) -> JointSteps:
        if model not in self._steps:
            self._steps[model] = JointSteps()
        return self._steps[model]

    def step(self, model: Any, run: Callable[[], Any]) -> Any:
        result = self._guarded(model, run)
        if model in _sessions:
            _sessions[model].after_step()
        return result

    def _guarded(self, model: Any, run: Callable[[], Any]) -> Any:
        """Runs something in which all ranks meet: bounded, with errors explained, and proved to reduce."""
        if world.current().watchdog is None:
            return run()
        session = _sessions.get(model)
        if session is None:
            count = self._calls[model] = self._calls.get(model, 0) + 1
            ranks = ranks_of(model.optimizer)
        else:
            count, ranks = session.execution + 1, session.ranks
        what = f"train step {count} of model {model.name!r}"
        return self.proved(model, lambda: self.watched(what, run, ranks))


def _leave_to_first_rank(session: FitSession, model: Any, callbacks: Any) -> None:
    if session.is_first_rank:
        return
    kept = []
    divided = divides_state(model.optimizer)
    for each in callbacks.callbacks:
        if not runs_on_first_rank_only(each):
            kept.append(each)
        elif divided and saves_model(each):
            keras_compat.only_take_part(each)
            kept.append(each)
    callbacks.callbacks = kept


def samples(data: Any) -> Any:
    """Rows of the first input of a batch; 1 if there is nothing to count."""
    inputs = data[0] if isinstance(data, tuple | list) and data else data
    for value in keras.tree.flatten(inputs):
        if isinstance(value, tf.SparseTensor):
            return value.dense_shape[0]
        if isinstance(value, tf.RaggedTensor):
            return value.nrows()
        if value is not None and tf.convert_to_tensor(value).shape.rank != 0:
            return tf.shape(value)[0]
    return 1


def require_equal_start(model: Any) -> None:
    """Refuses to train ranks that start from different weights: they would never become equal."""
    ranks = ranks_of(model.optimizer)
    if len(ranks) == 1:
        return
    trained = [describe(variable) for variable in model.trainable_variables]
    agree_on_list(trained, what="trainable weights", ranks=ranks)
    state = common_state(model, ignore=MOVING_STATISTICS)
    differing = differing_variables(state, ranks)
    if differing:
        path, where = next(iter(differing.items()))
        raise OutOfSyncError(
            f"All ranks must start from the same weights and optimizer state, but {len(differing)} of "
            f"{len(state)} variables of model {model.name!r} differ, first {path!r} on rank "
            f"{', '.join(map(str, where))}. Pass tfdist.callbacks.BroadcastGlobalVariablesCallback(0) to fit(), "
            "or call tfdist.broadcast_variables(model.variables, root_rank=0) before a loop of your own."
        )


def _unwrapped(model: Any) -> str:
    """Says why a model with a plain optimizer is refused."""
    kind = type(model.optimizer).__name__
    return (
        f"Model {model.name!r} would train on each of the {world.size()} ranks alone, and the ranks would drift "
        f"apart: its optimizer is a plain {kind}. Compile it with tfdist.DistributedOptimizer({kind}(...)), "
        "load it with tfdist.load_model, or, if this rank shall train it alone, put fit() into "
        "`with tfdist.local():`."
    )


def _bypassed(model: Any) -> str:
    """Says why a step without a reduction is refused."""
    return (
        f"The train_step of {type(model).__name__} made a step without combining gradients over the "
        f"{world.size()} ranks. Update through a tfdist.DistributedOptimizer, or take gradients from a "
        "tfdist.DistributedGradientTape; if this rank shall train it alone, put fit() into "
        "`with tfdist.local():`."
    )
