"""What tfdist does around `fit()` where `tf.distribute` places replicas: refuse, weigh, deal out, bound.

Keras's own loop does the rest: metrics are those of all replicas, so callbacks decide alike everywhere. Between
several workers a wait is bounded, and a worker that leaves says why (`placed_session`).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist import fit_hook, joint_step, keras_compat, operations, world
from tfdist.data.marks import Dealt, batch_size_of, dealt
from tfdist.errors import TfdistError
from tfdist.last_windows import LastWindows
from tfdist.placed_session import PlacedSession
from tfdist.strategies import placed


class PlacedHook(fit_hook.StepGuard):
    """Implements `keras_compat.ReplicaHook`."""

    def __init__(self) -> None:
        super().__init__()
        self._sessions: weakref.WeakKeyDictionary[Any, PlacedSession] = weakref.WeakKeyDictionary()
        self._windows = LastWindows()

    # Around fit().

    def fit(self, model: Any, run: Callable[[], Any]) -> Any:
        if joint_step.is_alone() or model in self._sessions or world.size() == 1:
            return run()
        session = self._sessions[model] = PlacedSession(model)
        try:
            return run()
        except Exception as error:
            explained = operations.translate(error, waiting_for=f"fit() of model {model.name!r}")
            session.fail(explained if isinstance(explained, Exception) else error)
            if explained is error:
                raise
            raise explained from error
        finally:
            del self._sessions[model]

    def evaluate(self, model: Any, data: Any, run: Callable[[], Any]) -> Any:
        return self._watched(f"evaluate of model {model.name!r}", run)

    def predict(self, model: Any, run: Callable[[], Any]) -> Any:
        return self._watched(f"predict of model {model.name!r}", run)

    def event(self, name: str, callbacks: Any, arguments: tuple[Any, ...], run: Callable[[], Any]) -> Any:
        self._windows.event(name, callbacks)
        model = arguments[0] if name == "set_model" else callbacks.model
        session = None if model is None else self._sessions.get(model)
        return run() if session is None else session.event(name, callbacks, arguments, run)

    # Around a step.

    def check(self, model: Any) -> None:
        """Refuses a model that would train wrong, or without the other replicas."""
        alone = joint_step.is_alone()
        if not alone:
            placed.require_scope(model._distribute_strategy, f"model {model.name!r}")
        super().check(model)
        self._windows.of(model).clear()
        if not alone and model.jit_compile and not model.run_eagerly:
            raise TfdistError(
                f"Strategy {world.current().strategy} can't compile the train step with XLA, in which replicas "
                f"communicate; model {model.name!r} was compiled with jit_compile=True. Leave it out, or use "
                'strategy="ring", which compiles all but the update.'
            )

    def before_first_step(self, model: Any, spec: Any) -> None:
        fit_hook.act_on_built(model)
        if not joint_step.is_alone():
            fit_hook.require_equal_start(model)

    @contextlib.contextmanager
    def joint_step(self, model: Any, data: Any) -> Iterator[None]:
        replica = tf.distribute.get_replica_context()
        if joint_step.is_alone() or replica is None or replica.strategy is not placed.distribution():
            yield
            return
        rows = tf.cast(fit_hook.samples(data), tf.float32)
        total = replica.all_reduce(tf.distribute.ReduceOp.SUM, rows)
        weight = tf.math.divide_no_nan(rows, total)
        counted = joint_step.counting(lambda: total, self._windows.of(model))
        with keras_compat.weighing_by(weight), keras_compat.noting_statistics(), counted:
            yield

    def keeps_xla_out(self, model: Any) -> bool:
        return True

    def distribute(self, strategy: Any, dataset: Any) -> tuple[Any, int]:
        """Gives each device its rows: those of a shard as it was dealt out, others as Keras means them."""
        devices = world.current().devices
        how = dealt(dataset)
        if how is None and world.size() > 1:
            return strategy.experimental_distribute_dataset(dataset), 1
        elements = devices if how is Dealt.TO_DEVICE else 1
        size = batch_size_of(dataset) if elements > 1 else None
        if size is not None:
            # So that the last batches, if they are fewer than devices, still give each device some rows.
            dataset = dataset.rebatch(size * devices)
        if size is not None or elements == 1:
            dataset = _divided(dataset, devices)
        return strategy.distribute_datasets_from_function(lambda _: dataset), elements

    def step(self, model: Any, run: Callable[[], Any]) -> Any:
        what = f"a train step of model {model.name!r}"
        return self.proved(model, lambda: self._watched(what, run))

    def _watched(self, what: str, run: Callable[[], Any]) -> Any:
        return run() if joint_step.is_alone() else self.watched(what, run)


def _divided(dataset: Any, devices: int) -> Any:
    """Each batch in as many parts, as equal as can be: the k-th for the k-th device."""
    if devices == 1:
        return dataset

    def parts(*batch: Any) -> Any:
        leaves = [
            leaf for leaf in keras.tree.flatten(batch) if isinstance(leaf, tf.Tensor) and leaf.shape.rank != 0
        ]
        rows = tf.shape(leaves[0], out_type=tf.int64)[0]

        def part(number: Any) -> Any:
            bounds = [rows // devices * n + tf.minimum(n, rows % devices) for n in (number, number + 1)]
            cut = keras.tree.map_structure(lambda leaf: leaf[bounds[0] : bounds[1]], batch)
            return cut[0] if len(cut) == 1 else cut

        return tf.data.Dataset.range(devices).map(part)

    return dataset.flat_map(parts)
