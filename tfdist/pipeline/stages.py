"""Runs the graph of a model stage by stage, each on its device, for one micro-batch after another.

Forward and backward pass of a stage are one `replay`, which keeps the stage's inputs, computes activations again,
and does so on the device of the forward pass. TensorFlow runs what is ready, so the stages overlap; what order a
stage needs beyond its data is given by `ordering`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.keras_compat.activity_losses import on_part_of_batch
from tfdist.keras_compat.functional_graphs import Part, parts_of, run_by
from tfdist.keras_compat.replay_scopes import add_losses
from tfdist.layers.decorating import is_recorded
from tfdist.layers.replay import replay
from tfdist.pipeline.micro_batches import MicroBatches
from tfdist.pipeline.ordering import fork, join

Call = Callable[[Any], Any]


def run_in_stages(
    model: Any, functional: Any, ends: Sequence[int], devices: Sequence[str], count: int
) -> list[Part]:
    """From now on the model runs in stages, and in micro-batches where a gradient may be asked for.

    Args:
        model: to which losses are added.
        functional: from `graph_of`.
        ends: for each stage the number of the node after it.
        devices: of the stages.
        count: of micro-batches.

    Returns:
        What is on the stages.
    """
    parts = parts_of(functional, ends, set(range(len(ends))))
    inputs, outputs = ([id(each) for each in ends_of] for ends_of in (functional.inputs, functional.outputs))

    def loop(values: dict[int, Any], operation_fn: Call) -> None:
        if not is_recorded():
            for part, device in zip(parts, devices, strict=True):
                with tf.device(device):
                    _update(values, part, part.run([values[each] for each in part.inputs], operation_fn))
            return
        batch = MicroBatches([values[each] for each in inputs], count)
        tokens: list[Any] = [None] * len(parts)
        made = []
        for number in range(count):
            own = dict(zip(inputs, batch.piece(number), strict=True))
            for stage, part in enumerate(parts):
                given = join([own[each] for each in part.inputs], tokens[stage])
                with tf.device(devices[stage]):
                    results = _replayed(model, part, given, operation_fn, batch.share(number))
                results, tokens[stage] = fork(results)
                _update(own, part, results)
            made.append([own[each] for each in outputs])
        with tf.device(devices[-1]):
            joined = [batch.joined(pieces) for pieces in zip(*made, strict=True)]
        values.update(zip(outputs, joined, strict=True))

    run_by(functional, parts, loop)
    return parts


def _update(values: dict[int, Any], part: Part, results: Sequence[Any]) -> None:
    values.update(zip(part.outputs, results, strict=True))


def _replayed(model: Any, part: Part, inputs: Sequence[Any], operation_fn: Call, share: Any) -> Sequence[Any]:
    call = on_part_of_batch(model, lambda *given: part.run(given, operation_fn), share)
    outputs, losses = replay(model, call, tuple(inputs), {}, layers=part.layers)
    add_losses(model, [loss * tf.cast(share, loss.dtype) for loss in losses])
    results: Sequence[Any] = outputs
    return results
