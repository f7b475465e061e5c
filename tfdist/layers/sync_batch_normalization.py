"""`SyncBatchNormalization`: batch normalization with the moments of the global batch.

Problem: `keras.layers.BatchNormalization` normalizes each rank's batch by itself, so N ranks train another model
than one process with the global batch, a worse one where a rank's batch is small (images of high resolution), and
their moving statistics drift apart.

Solution: Keras's layer, which takes its moments from `global_moments`. Everything else, and everything in a world
of one rank, is Keras's.
"""

from __future__ import annotations

import re
from typing import Any

import keras
import tensorflow as tf

from tfdist import joint_step, world
from tfdist.layers.global_moments import global_moments
from tfdist.layers.replica_moments import in_replicas, replica_moments
from tfdist.process_sets import ProcessSet, global_process_set


@keras.saving.register_keras_serializable(package="tfdist")
class SyncBatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc, unused-ignore]
    """`keras.layers.BatchNormalization` over the batches of all ranks.

    In training every rank of the process set calls it, as often as the others; batches may differ in size, masks
    are obeyed, and a rank that has run out of data in `fit()` takes part with nothing. Each call sends one small
    message forward (an all-gather of 2C+5 numbers for C channels) and one backward (an all-reduce of 2C). With
    `training=False`, frozen, or in a world of one rank nothing is sent, and it is BatchNormalization.

    N ranks compute what one process computes on the global batch: outputs, gradients, and moving statistics,
    which are bit-identical on all ranks. Gradients are those of the mean over all samples in `fit()`, and of the
    ranks' mean in a custom loop, as `DistributedOptimizer` and `DistributedGradientTape` average them by default.

    XLA can't run it on several ranks: Keras leaves XLA off, with a warning where `compile(jit_compile=True)` asked.

    A model saved with it loads where `tfdist.layers` has been imported. For plain Keras, and to exchange
    `.weights.h5` files with plain models, turn it back first: `tfdist.layers.sync_batch_norm(model, undo=True)`.

    Args:
        axis: as for `keras.layers.BatchNormalization`, like all other arguments but the next.
        process_set: `tfdist.ProcessSet` of the ranks that share their batches; all by default. Give that of the
            `DistributedOptimizer`, or a part of it. It isn't saved: a loaded or cloned layer is of all ranks.

    Raises:
        TypeError: `process_set` is no `tfdist.ProcessSet`.

    Example:
        >>> import numpy as np, tfdist
        >>> tfdist.init()
        >>> layer = tfdist.layers.SyncBatchNormalization(momentum=0.9)
        >>> normal = layer(np.array([[1.0], [3.0]]), training=True)
        >>> np.round(normal, 2).tolist()
        [[-1.0], [1.0]]

    Reference:
        Ioffe, Szegedy 2015, "Batch Normalization"; over several devices: Peng et al. 2018, "MegDet".
    """

    synchronized_over_ranks = True
    """Tells `fit()` that steps without data leave its variables as the other ranks have them."""
    process_set: ProcessSet = global_process_set

    def __init__(
        self, axis: int = -1, *args: Any, process_set: ProcessSet | None = None, **kwargs: Any
    ) -> None:
        super().__init__(axis, *args, **kwargs)
        if process_set is not None:
            self.process_set = checked_process_set(process_set)

    @property
    def supports_jit(self) -> bool:
        """Whether XLA may compile it: not where it has to ask other ranks."""
        return not self._asks_other_ranks()

    @supports_jit.setter
    def supports_jit(self, value: bool) -> None:
        """Every Keras layer sets it to True when it is made, which means nothing here."""

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator, unused-ignore]
    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        """Normalizes; see `keras.layers.BatchNormalization`."""
        self._proceeds = None
        # In a step that updates nothing moving statistics must stay, too.
        before = []
        if joint_step.current() is not None and training and self.trainable and self._asks_other_ranks():
            before = [(variable, tf.identity(variable.value)) for variable in self.non_trainable_variables]
        outputs = super().call(inputs, training=training, mask=mask)
        proceeds, self._proceeds = self._proceeds, None
        for variable, value in before:
            variable.assign(tf.where(proceeds, variable.value, value))
        return outputs

    def _moments(self, inputs: Any, mask: Any) -> Any:
        if in_replicas():
            return replica_moments(inputs, self._reduction_axes, mask)
        if not self._asks_other_ranks():
            return super()._moments(inputs, mask)
        mean, variance, self._proceeds = global_moments(
            inputs, self._reduction_axes, mask, name=self._collective_name(), process_set=self.process_set
        )
        return mean, variance

    def _asks_other_ranks(self) -> bool:
        if (
            not world.is_initialized()
            or world.is_alone()
            or world.current().is_placed
            or joint_step.is_alone()
        ):
            return False
        return self.process_set.group().size > 1

    def _collective_name(self) -> str:
        """The layer's path without the numbers that Keras gives in each process on its own."""
        path = getattr(self, "path", None) or self.name  # Keras < 3.5 has no path
        return re.sub(r"_\d+(?=/|$)", "", f"sync_batch_norm/{path}")


def checked_process_set(process_set: Any) -> ProcessSet:
    """The process set, if it is one."""
    if not isinstance(process_set, ProcessSet):
        raise TypeError(
            "process_set must be a tfdist.ProcessSet, as tfdist.add_process_set returns it; received "
            f"{process_set!r}."
        )
    return process_set
