"""Mean and variance over the batches of all replicas of a `tf.distribute.Strategy`.

As `global_moments`, in replica context: counts and sums are added up over the replicas, then the squared deviations
from the common mean. TensorFlow knows the gradient of a sum over replicas. Losses are weighed by the rows of each
replica before back-propagation, so nothing is weighed here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.layers.global_moments import local_moments

_SUM = tf.distribute.ReduceOp.SUM


def in_replicas() -> bool:
    """Whether this is the program of one of several replicas."""
    replica = tf.distribute.get_replica_context()
    return replica is not None and replica.num_replicas_in_sync > 1


def replica_moments(inputs: Any, axes: Sequence[int], mask: Any = None) -> tuple[Any, Any]:
    """Mean and biased variance of `inputs` over `axes` and over the replicas, each `[channels]`; all call it.

    Args:
        inputs: float32 or float64, this replica's batch; its size along `axes` may differ, and be 0.
        axes: all axes but that of the channels.
        mask: as `inputs` without the last axis; where it is false, values don't count.
    """
    replica = tf.distribute.get_replica_context()
    local = local_moments(inputs, axes, mask, idle=False)
    count, total = replica.all_reduce(_SUM, [local.count, local.count * local.mean])
    mean = tf.math.divide_no_nan(total, count)
    between = local.count * tf.math.squared_difference(local.mean, mean)
    variance = tf.math.divide_no_nan(replica.all_reduce(_SUM, local.squares + between), count)
    return mean, variance
