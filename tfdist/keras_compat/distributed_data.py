"""Data, symbolic build and logs of `fit` under a strategy (Keras >= 3.3).

Four faults of `keras/src/backend/tensorflow/trainer.py`:

1. `_maybe_symbolic_build` takes a batch from the data to see its shape. It consumes it; and between several workers
   it hands over per-replica values, on which the build fails. What a batch looks like is known without one.
2. `reduce_per_replica` averages scalars along axis 0 between several workers, which fails. The logs of one batch
   are this worker's, as under MirroredStrategy they are those of the replicas at hand.
3. With `steps_per_execution` above 1 the loop over steps, a graph, fails when collectives run in it ("You must feed
   a value for placeholder tensor"). Between several workers the steps are called one by one.
4. A dataset is always taken for global batches. Those of `tfdist.shard` may be per replica (`ReplicaHook`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.keras_compat.hook import ReplicaHook


def build_from_spec(original: Callable[..., None]) -> Callable[..., None]:
    """`Trainer._maybe_symbolic_build`."""

    def _maybe_symbolic_build(self: Any, iterator: Any = None, data_batch: Any = None) -> None:
        dataset = getattr(iterator, "_distributed_dataset", None)
        if self._distribute_strategy is None or dataset is None:
            original(self, iterator=iterator, data_batch=data_batch)
            return
        spec = tf.nest.map_structure(_of_one_replica, dataset.element_spec)
        with self.distribute_strategy.scope():
            self._symbolic_build(data_batch=spec)

    return _maybe_symbolic_build


def reduce_logs_locally(original: Callable[..., Any]) -> Callable[..., Any]:
    """`reduce_per_replica`."""

    def reduce_per_replica(values: Any, strategy: Any, reduction: str) -> Any:
        if reduction not in ("auto", "mean") or not _spans_workers(strategy):
            return original(values, strategy, reduction)
        return tf.nest.map_structure(
            lambda value: tf.reduce_mean(strategy.experimental_local_results(value), axis=0), values
        )

    return reduce_per_replica


def step_by_step(original: Callable[..., Callable[[Any], Any]]) -> Callable[..., Callable[[Any], Any]]:
    """`Trainer._make_function`."""

    def _make_function(self: Any, step_function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        one_step = original(self, step_function)
        if not _spans_workers(self._distribute_strategy):
            return one_step

        def function(iterator: Any) -> Any:
            if self.steps_per_execution == 1 or not isinstance(iterator, tf.distribute.DistributedIterator):
                return one_step(iterator)
            # Keras calls step by step for iterators of Python; the first batch shows whether there is one.
            return one_step(itertools.chain([next(iterator)], iterator))

        return function

    return _make_function


def distribute_by(original: Callable[..., None], hook: ReplicaHook) -> Callable[..., None]:
    """`TFEpochIterator.__init__`."""
    from keras.src.trainers.epoch_iterator import EpochIterator

    def __init__(self: Any, distribute_strategy: Any = None, *args: Any, **options: Any) -> None:  # noqa: N807 (it replaces one)
        if distribute_strategy is None or distribute_strategy is tf.distribute.get_strategy():
            original(self, distribute_strategy, *args, **options)
            return
        EpochIterator.__init__(self, *args, **options)
        self._distribute_strategy = distribute_strategy
        dataset = self.data_adapter.get_tf_dataset()
        if not isinstance(dataset, tf.distribute.DistributedDataset):
            dataset, elements = hook.distribute(distribute_strategy, dataset)
            if elements > 1:
                self.data_adapter = _InSteps(self.data_adapter, elements)
                self._num_batches = self.data_adapter.num_batches
        self._distributed_dataset = dataset

    return __init__


class _InSteps:
    """A data adapter of which several elements make a step."""

    def __init__(self, adapter: Any, elements: int) -> None:
        self._adapter = adapter
        self._elements = elements

    @property
    def num_batches(self) -> int | None:
        number = self._adapter.num_batches
        return None if number is None else -(-number // self._elements)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adapter, name)


def _of_one_replica(spec: Any) -> Any:
    spec = spec._component_specs[0] if hasattr(spec, "_component_specs") else spec
    return None if isinstance(spec, tf.OptionalSpec) else spec  # Keras hands on None there


def _spans_workers(strategy: Any) -> bool:
    return (
        isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
        and strategy.extended._in_multi_worker_mode()
    )
