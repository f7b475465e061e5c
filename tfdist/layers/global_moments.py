"""Mean and variance over the batches of all ranks.

Problem: sums of x and x² over ranks would be one cheap all-reduce, but E[x²] - E[x]² loses all digits where the
mean is large beside the deviation. Two passes lose none, and cost two messages.

Solution: each rank sends count, mean and sum of squared deviations of its own batch, and every rank combines
them (Chan, Golub, LeVeque 1979, "Updating formulae and a pairwise algorithm for computing sample variances"):

    n = Σ nᵣ        mean = Σ nᵣ meanᵣ / n        n·variance = Σ (M2ᵣ + nᵣ (meanᵣ - mean)²)

One all-gather forward, one all-reduce of the two gradients backward. A rank without data sends a count of 0.

In a step of `fit()` ranks count by their samples: the common loss is Σ shareᵣ lossᵣ, and each rank's gradients
are multiplied by its share after back-propagation. What comes from another rank's loss must carry the share of
that rank instead; here it is multiplied by the one and divided by the other. What ranks tell each other in a step
rides along (`joint_step`), since moving statistics are updated before gradients are exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist import joint_step, world
from tfdist.layers.remembering import remembered
from tfdist.operations import Sum, allreduce
from tfdist.operations.agreement import begin, describe, run_engine
from tfdist.process_sets import ProcessSet


class Moments(NamedTuple):
    """Moments of the global batch, bit-identical on all ranks.

    Attributes:
        mean: `[channels]`.
        variance: `[channels]`, biased, as batch normalization takes it.
        proceeds: bool scalar, whether the step updates anything; None outside of a step of `fit()`.
    """

    mean: Any
    variance: Any
    proceeds: Any


class _Local(NamedTuple):
    count: Any  # [1], or with a mask [channels]
    mean: Any
    squares: Any  # sum of squared deviations from the mean


def global_moments(
    inputs: Any, axes: Sequence[int], mask: Any = None, *, name: str, process_set: ProcessSet
) -> Moments:
    """Mean and variance of `inputs` over `axes` and over the ranks; every rank of `process_set` calls it.

    Bytes: for C channels and N ranks each rank sends (N-1)·(2C+5) numbers forward, 4(N-1)/N·C backward.

    Args:
        inputs: float32 or float64, this rank's batch; its size along `axes` may differ between ranks, and be 0.
        axes: all axes but that of the channels.
        mask: as `inputs` without the last axis; where it is false, values don't count.
        name: identifies the collective on all ranks.
        process_set: the ranks that take part.
    """
    step = joint_step.current()
    local = local_moments(inputs, axes, mask, idle=step is not None and step.idle)
    if step is None:
        return _combine(local, None, [], name, process_set)
    share, message = remembered(lambda: _said_in(step))
    return _combine(local, share, message, name, process_set)


def _said_in(step: Any) -> tuple[Any, Any]:
    share = step.share()
    return share, step.message(share)


def local_moments(inputs: Any, axes: Sequence[int], mask: Any, *, idle: bool) -> _Local:
    """Moments of this rank's batch; with a count of 0 they are zeros, whatever the batch holds."""
    (channel,) = set(range(inputs.shape.rank)) - set(axes)
    channels = inputs.shape[channel]
    present = None
    if mask is None:
        count = tf.cast(tf.size(inputs, out_type=tf.int64) // channels, inputs.dtype)
        count = tf.reshape(count, [1] * inputs.shape.rank)
    else:
        present = tf.broadcast_to(tf.cast(mask, tf.bool)[..., tf.newaxis], tf.shape(inputs))
        count = tf.reduce_sum(tf.cast(present, inputs.dtype), axes, keepdims=True)
    if idle:
        # Not constants: back-propagation must come by here, as the other ranks wait for it in the collective.
        present, count = False, tf.zeros_like(count)
    inputs = _where(present, inputs)
    mean = tf.math.divide_no_nan(tf.reduce_sum(inputs, axes, keepdims=True), count)
    deviation = tf.math.squared_difference(inputs, tf.stop_gradient(mean))
    return _Local(
        tf.reshape(count, [1 if mask is None else channels]),
        tf.reshape(mean, [channels]),
        tf.reshape(tf.reduce_sum(_where(present, deviation), axes), [channels]),
    )


def _where(present: Any, values: Any) -> Any:
    return values if present is None else tf.where(present, values, tf.zeros([], values.dtype))


def _combine(local: _Local, share: Any, message: Any, name: str, process_set: ProcessSet) -> Moments:
    """Gathers the ranks' moments and combines them, with the gradient."""
    dtype = local.mean.dtype
    message = tf.cast(message, dtype)
    parts = [*local, message]
    row = tf.concat(parts, 0)
    # Inside `recompute` the second run asks nobody, and takes what the ranks said in the first.
    call = remembered(lambda: begin("allgather", name, process_set, signature=f"moments {describe([row])}"))
    engine, group = world.current().engine, call.group

    def gather(sent: Sequence[Any]) -> list[Any]:
        lengths = [1] * group.size
        return [engine.allgather(sent[0], name=call.name, group=group, lengths=lengths)]

    @tf.custom_gradient  # type: ignore[untyped-decorator, unused-ignore]
    def run(own_mean: Any, own_squares: Any) -> Any:
        sent = tf.concat([local.count, own_mean, own_squares, message], 0)[tf.newaxis]
        (rows,) = remembered(lambda: run_engine(call, [sent], gather))
        counts, means, squares, messages = tf.split(rows, [part.shape[0] for part in parts], 1)
        count = tf.reduce_sum(counts, 0)
        mean = tf.math.divide_no_nan(tf.reduce_sum(counts * means, 0), count)
        between = counts * tf.math.squared_difference(means, mean)
        variance = tf.math.divide_no_nan(tf.reduce_sum(squares + between, 0), count)

        def gradient(of_mean: Any, of_variance: Any, _: Any) -> tuple[Any, Any]:
            upstream = tf.concat([of_mean, of_variance], 0)
            if share is not None:
                upstream = tf.math.multiply_no_nan(upstream, tf.cast(share, dtype))
            total = allreduce(upstream, op=Sum, name=call.gradient, process_set=process_set)
            if share is not None:
                total = tf.math.divide_no_nan(total, tf.cast(share, dtype))
            of_mean, of_variance = tf.split(total, 2)
            part = tf.math.divide_no_nan(local.count, count)
            return (
                part * (of_mean + 2.0 * (own_mean - mean) * of_variance),
                tf.math.divide_no_nan(of_variance, count),
            )

        return (mean, variance, tf.reduce_sum(messages, 0)), gradient

    mean, variance, heard = run(local.mean, local.squares)
    return Moments(mean, variance, None if share is None else joint_step.proceeds(heard))
