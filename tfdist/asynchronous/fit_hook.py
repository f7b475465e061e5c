"""What tfdist does around `fit()` of models that workers train; `keras_compat` finds the places in Keras."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist import joint_step
from tfdist.asynchronous.fleet import LOSSES, SETTLE, Fleet
from tfdist.asynchronous.held_arrays import LARGEST, HeldArrays
from tfdist.asynchronous.scheduler import Scheduler, flat_tensors
from tfdist.asynchronous.server_update import ServerUpdate
from tfdist.asynchronous.servers import explain_loss
from tfdist.asynchronous.worker_step import WorkerStep
from tfdist.data.row_sources import RowNumbers, source_of
from tfdist.errors import OutOfSyncError, TfdistError
from tfdist.metric_merging import adds_up, own_metrics
from tfdist.optimizer import is_distributed
from tfdist.strategies import placed
from tfdist.strategies.asynchronous_roles import NAME


class AsynchronousHook:
    """Implements what `keras_compat.install_asynchronous` asks for.

    Args:
        fleet: who computes.
        max_staleness: bound of staleness, or None.
    """

    def __init__(self, fleet: Fleet, max_staleness: int | None) -> None:
        self._fleet = fleet
        self._max_staleness = max_staleness
        self._schedulers: weakref.WeakKeyDictionary[Any, Scheduler] = weakref.WeakKeyDictionary()
        self._fitting: weakref.WeakSet[Any] = weakref.WeakSet()
        # Shards of arrays: what is iterated in their place, and the arrays.
        self._numbers: weakref.WeakKeyDictionary[Any, tuple[Any, HeldArrays]] = weakref.WeakKeyDictionary()
        self._held: weakref.WeakKeyDictionary[Any, HeldArrays] = weakref.WeakKeyDictionary()
        self._told: set[str] = set()

    def check_scope(self, model: Any) -> None:
        """Refuses a model whose variables are not on the servers."""
        if not joint_step.is_alone() and model._distribute_strategy is not placed.distribution():
            raise TfdistError(
                f"Under strategy {NAME} the servers keep the model, so it is made in tfdist.scope(); model "
                f"{model.name!r} was made outside. Write `with tfdist.scope():` around the lines that make the "
                "model, the optimizer and compile(). To train it in this process on purpose, put compile() and "
                "fit() into `with tfdist.local():`."
            )

    def fit(self, model: Any, run: Callable[[], Any]) -> Any:
        if model in self._fitting:
            return run()
        self._fitting.add(model)
        try:
            return run()
        except LOSSES as error:
            if not self._fleet.is_failed(within=SETTLE):
                raise
            raise explain_loss(self._fleet.control, error) from error
        finally:
            self._fitting.discard(model)
            if model in self._schedulers:
                self._schedulers[model].discard()

    def replace_data(self, model: Any, data: Any) -> Any:
        """What `fit()` iterates in place of `data`: for arrays that the workers can hold, the numbers of rows."""
        source = source_of(data)
        if source is None or source.bytes > LARGEST or joint_step.is_alone():
            return data
        if data not in self._numbers:
            self._numbers[data] = source.numbers(), HeldArrays(source)
        numbers, self._held[model] = self._numbers[data]
        return numbers

    def describe(self, model: Any, spec: Any) -> Any:
        """How a batch looks to the model, from the description of what `fit()` iterates."""
        return self._held[model].element_spec if isinstance(spec, RowNumbers) else spec

    def event(self, name: str, callbacks: Any, arguments: tuple[Any, ...], run: Callable[[], Any]) -> Any:
        model = arguments[0] if name == "set_model" else callbacks.model
        scheduler = self._schedulers.get(model) if model is not None else None
        if scheduler is not None and model in self._fitting:
            if name == "on_epoch_begin":
                scheduler.begin_epoch((callbacks.params or {}).get("steps"))
            elif name in ("on_test_begin", "on_epoch_end"):
                scheduler.discard()  # training was stopped within the epoch
        return run()

    def make_train_function(self, model: Any) -> Callable[[Any], Any] | None:
        """What `fit()` calls with an iterator for the next logs; None for a model that is trained here alone."""
        self._check(model)
        if model._distribute_strategy is not placed.distribution():
            return None
        scheduler = self._schedulers[model] = Scheduler(self._fleet, self._max_staleness)
        kinds: dict[tuple[int, str], tuple[WorkerStep, ServerUpdate]] = {}

        def prepare(batch: Any) -> tuple[list[Any], WorkerStep, ServerUpdate]:
            tensors, structure, spec = flat_tensors(batch)
            arrays = self._held[model] if isinstance(batch, RowNumbers) else None
            kind = id(arrays), str((tf.nest.map_structure(lambda part: part is None, structure), spec))
            if kind not in kinds:
                step = WorkerStep(model, model.train_step, arrays)
                step.prepare(structure, spec)
                kinds[kind] = step, ServerUpdate(model, step)
            return tensors, *kinds[kind]

        def train_function(iterator: Any) -> Any:
            if model not in self._fitting:  # train_on_batch
                scheduler.begin_epoch(None)
            logs: dict[str, Any] = {}
            for number in range(model.steps_per_execution):
                try:
                    logs = scheduler.next_logs(iter(iterator), prepare)
                except StopIteration:
                    if number == 0:
                        raise
                    break
            if model in self._fitting:
                logs["staleness"] = scheduler.staleness
            return logs

        return train_function

    def _check(self, model: Any) -> None:
        self.check_scope(model)
        if joint_step.is_alone():
            return
        if model.optimizer is not None and not is_distributed(model.optimizer):
            kind = type(model.optimizer).__name__
            raise OutOfSyncError(
                f"Workers send the gradients of model {model.name!r} to the servers, but its optimizer is a plain "
                f"{kind}, which would update where it is called. Compile it with "
                f"tfdist.DistributedOptimizer({kind}(...)) in tfdist.scope()."
            )
        if model.run_eagerly:
            raise TfdistError(
                f"Strategy {NAME} runs the train step on other processes, which takes a graph; received "
                'run_eagerly=True. Leave it out, or debug under strategy "ring" or in one process.'
            )
        for metric in own_metrics(model):
            if not adds_up(metric):
                raise TfdistError(
                    f"Workers measure batches on their own, and what they measure is added up. Metric "
                    f"{metric.name!r} of class {type(metric).__name__} does not say that its state is a sum over "
                    'samples: set `tfdist_state = "sum"` on its class if it is, or leave the metric out.'
                )
        if model.jit_compile:
            self._tell("jit_compile: XLA can't read variables of another process, so steps run without XLA.")

    def _tell(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            print(f"tfdist: {message}", flush=True)
