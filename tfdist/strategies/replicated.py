"""Strategies of `tf.distribute`: several devices of a process compute gradients, and make one update.

Each replica runs the whole train step, in a thread that stops where replicas meet. They meet twice:

    replica 0   rows ─┐              forward, backward ── gradients ─┐          update of device 0
    replica 1   rows ─┴─ share each  forward, backward ── gradients ─┴─ sums    update of device 1

Losses are weighed by the shares (`keras_compat.replica_weights`), so the sums are the gradients of the global
batch. The update is then made by every device that keeps variables, as one process makes it, with the whole of
Keras's optimizer after the sum: clipping, finiteness, weight decay, moving averages, accumulation
(`keras_compat.one_device`). What layers have assigned in the forward pass is averaged in the same message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import tensorflow as tf

from tfdist import keras_compat
from tfdist.collectives.base import Group, ReduceOp
from tfdist.errors import TfdistError
from tfdist.gradients import SMALL_TABLE_BYTES, GradientReducer, sum_duplicate_rows, table_bytes, to_dense
from tfdist.strategies import placed
from tfdist.strategies.base import Apply, Gradients, Strategy

Update = Callable[[Sequence[Any], Sequence[Any], int], Any]


class Replicated(Strategy):
    """Sums gradients over the replicas of the world's `tf.distribute.Strategy`.

    Attributes:
        is_one_process: whether a world of several ranks is refused.
    """

    is_one_process: ClassVar[bool] = True

    def __init__(self, reducer: GradientReducer, group: Group, **_: Any) -> None:
        super().__init__(reducer, group)
        _refuse(reducer, self.name)

    @classmethod
    def check(cls, ranks: int, **options: Any) -> None:
        unknown = set(options) - {"devices"}
        if unknown:
            raise TfdistError(f"{cls.name} takes devices=k; received {', '.join(sorted(unknown))}.")
        devices = options.get("devices", 1)
        if not isinstance(devices, int) or isinstance(devices, bool) or devices < 1:
            raise TfdistError(f"{cls.name}(devices=k) needs an integer k >= 1; received {devices!r}.")
        if ranks > 1 and cls.is_one_process:
            raise TfdistError(
                f'strategy="{cls.name}" is one process with several devices; received {ranks} ranks. Use '
                f'"multi_worker_mirrored" for several processes, or start one.'
            )

    @classmethod
    def places_replicas(cls) -> bool:
        return True

    def build(self, optimizer: Any, variables: Sequence[Any]) -> None:
        for each in keras_compat.innermost(optimizer):
            placed.require_scope(each._distribution_strategy, f"optimizer {each.name!r}")
        with placed.distribution().scope():
            optimizer.build(variables)

    def run(self, gradients: Gradients, variables: Sequence[Any], optimizer: Any, update: Update) -> None:
        """Makes one update of all replicas; each of them calls it, in its replica context.

        Args:
            gradients: this replica's, of losses that are weighed by `keras_compat.replica_weight()`.
            variables: what they belong to.
            optimizer: the outermost that updates them, built.
            update: given global gradients, what they belong to and the number of this device, updates that device.
        """
        replica = tf.distribute.get_replica_context()
        if replica is None or replica.strategy is not placed.distribution():
            raise TfdistError(
                f"Strategy {self.name} updates weights in the replicas' train step. Call apply from a function "
                "that `strategy.run` runs, as fit() does, with strategy = tf.distribute.get_strategy() inside "
                "`with tfdist.scope():`."
            )
        self.reducer.calls += 1
        GradientReducer.reductions += 1
        weight = keras_compat.replica_weight()
        statistics = keras_compat.noted_statistics()
        number = int(replica.strategy.extended._get_local_replica_id(replica._replica_id))
        copies = [keras_compat.copy_of(variable._value, number) for variable in statistics]
        share = 1.0 / replica.num_replicas_in_sync if weight is None else weight
        sent = [
            self._prepared(gradient, variable, weight)
            for gradient, variable in zip(gradients, variables, strict=True)
        ]
        present = [i for i, gradient in enumerate(sent) if gradient is not None]
        means = [tf.math.multiply_no_nan(copy.read_value(), tf.cast(share, copy.dtype)) for copy in copies]
        sums = _sum_over_replicas(replica, [*(sent[i] for i in present), *means])
        for copy, mean in zip(copies, sums[len(present) :], strict=True):
            copy.assign(mean)
        total: list[Any] = [None] * len(sent)
        for i, value in zip(present, sums, strict=False):
            total[i] = sum_duplicate_rows(value) if isinstance(value, tf.IndexedSlices) else value
        if self._updates_here(number):
            with keras_compat.on_one_device(optimizer, variables, number) as chosen:
                update(total, chosen, number)

    def update(
        self,
        gradients: Gradients,
        variables: Sequence[Any],
        apply: Apply,
        *,
        optimizer: Any,
        weighed_by: Any = None,
    ) -> Any:
        return apply(gradients, variables)

    def on_each_device(
        self, optimizer: Any, variables: Sequence[Any], act: Callable[[Sequence[Any], int], Any]
    ) -> None:
        for number, device in enumerate(placed.distribution().extended.worker_devices):
            if self._updates_here(number):
                with tf.device(device), keras_compat.on_one_device(optimizer, variables, number) as chosen:
                    act(chosen, number)

    def finalize(self, optimizer: Any, variables: Sequence[Any]) -> None:
        self.on_each_device(
            optimizer, variables, lambda chosen, _: optimizer.finalize_variable_values(chosen)
        )

    def _updates_here(self, number: int) -> bool:
        """Whether the device keeps variables of its own."""
        return True

    def _prepared(self, gradient: Any, variable: Any, weight: Any) -> Any:
        if gradient is None:
            return None
        if getattr(variable, "overwrite_with_gradient", False):
            raise TfdistError(
                f"Strategy {self.name} can't train float8 layers, whose scales are maxima over replicas. Use "
                'strategy="ring".'
            )
        if isinstance(gradient, tf.IndexedSlices):
            shape = tf.constant(tf.TensorShape(variable.shape).as_list(), tf.int64)
            gradient = tf.IndexedSlices(gradient.values, gradient.indices, shape)
            if self.reducer.sparse_as_dense or table_bytes(gradient) <= SMALL_TABLE_BYTES:
                gradient = to_dense(gradient)
            else:
                gradient = sum_duplicate_rows(gradient)
        return gradient if weight is None else _zero_without_rows(gradient, weight)


def _sum_over_replicas(replica: Any, values: Sequence[Any]) -> list[Any]:
    """Sums, dense and sparse ones each in one message."""
    dense = [i for i, value in enumerate(values) if not isinstance(value, tf.IndexedSlices)]
    sparse = [i for i, value in enumerate(values) if isinstance(value, tf.IndexedSlices)]
    results: list[Any] = [None] * len(values)
    for places in (dense, sparse):
        if places:
            sums = replica.all_reduce(tf.distribute.ReduceOp.SUM, [values[i] for i in places])
            for i, value in zip(places, sums, strict=True):
                results[i] = value
    return results


def _zero_without_rows(gradient: Any, weight: Any) -> Any:
    """A gradient, or zeros where the replica's batch is empty, whose mean is no number."""
    values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    if tf.executing_eagerly():
        kept = values if float(weight) > 0.0 else tf.zeros_like(values)
    else:
        # What `tf.cond` becomes when it runs, at a third of its operations.
        empty, full = tf.raw_ops.Switch(data=values, pred=weight > 0.0)
        zeros = tf.math.multiply_no_nan(empty, tf.zeros([], values.dtype))
        kept = tf.raw_ops.Merge(inputs=[full, zeros]).output
        kept.set_shape(values.shape)
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(kept, gradient.indices, gradient.dense_shape)
    return kept


def _refuse(reducer: GradientReducer, name: str) -> None:
    """Refuses arguments of `DistributedOptimizer` that say how ranks communicate."""
    said = {
        "op": reducer.op is not ReduceOp.AVERAGE,
        "compression": reducer.compression is not None,
        "gradient_predivide_factor": reducer.predivide_factor != 1.0,
        "process_set": reducer.group is not None,
        "groups": reducer.groups is not None,
        "device_dense, device_sparse": bool(reducer.device_dense or reducer.device_sparse),
    }
    for argument, given in said.items():
        if given:
            raise TfdistError(
                f"{argument} says how the ranks of a ring communicate; under strategy {name} TensorFlow sums the "
                f'gradients. Leave it out, or use strategy="ring".'
            )
