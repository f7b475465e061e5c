"""The servers' half of a training step: they apply what a worker has left there, when the chief says so.

It is one call of one function, in which nothing depends on a worker any more, and the chief makes one such
call at a time. So no update, slot write, iteration or count can be lost or be done twice, and no lock is
needed; and between two calls, when callbacks run, weights, slots and metrics belong to the same number of
updates.

Where the loss is scaled, the scale may have changed since the worker has read it. The optimizer divides by the
present one, so gradients are first brought to it; both are powers of two, which costs no precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist import keras_compat
from tfdist.asynchronous.worker_step import StepResult, WorkerStep
from tfdist.gradients import scale

_CHIEF = "/job:chief/replica:0/task:0/device:CPU:0"


class ServerUpdate:
    """Applies results of one kind of step.

    Args:
        model: whose variables they change.
        step: the prepared step that makes the results.
    """

    def __init__(self, model: Any, step: WorkerStep) -> None:
        self._model = model
        self._step = step
        self._device = model.variables[0].value.device
        # One server runs all of it, which takes the fewest messages. Servers don't see each other, so with several
        # it is a function of this process, with parts on them.
        variables = [*model.variables, *(model.optimizer.variables if model.optimizer is not None else ())]
        alone = len({variable.value.device for variable in variables}) == 1
        self._runs_on: str | None = self._device if alone else None
        self._results_on: str = self._device if alone else _CHIEF
        self._function = tf.function(self._apply, autograph=False)
        self._kinds: Any = {}

    def __call__(self, outputs: Sequence[Any]) -> dict[str, Any]:
        """Applies a result.

        Args:
            outputs: what the step has returned.

        Returns:
            The logs: metrics after the update, and what the step itself reported.
        """
        with tf.device(self._runs_on):
            numbers, others = self._function(list(outputs))
        # As tensors each would be a message of its own, and Keras asks for all of them.
        values, tensors = iter(numbers.numpy()), iter(others)
        leaves = [
            next(values) if is_number else next(tensors).numpy() for is_number in tf.nest.flatten(self._kinds)
        ]
        logs: dict[str, Any] = tf.nest.pack_sequence_as(self._kinds, leaves)
        return logs

    def _apply(self, outputs: Sequence[Any]) -> tuple[Any, list[Any]]:
        with tf.device(self._device):
            result = self._step.unpack(outputs)
            for variable, amount in result.changes:
                variable.value.assign_add(amount)
            for optimizer, gradients, variables in result.gradients:
                optimizer.apply(self._rescaled(gradients, result), variables)
            logs = {**result.logs, **self._model.get_metrics_result()}
            self._kinds = tf.nest.map_structure(_is_number, logs)
            leaves = tf.nest.flatten(logs)
            numbers = [tf.cast(leaf, tf.float32) for leaf in leaves if _is_number(leaf)]
        with tf.device(self._results_on):
            return tf.stack(numbers), [tf.identity(leaf) for leaf in leaves if not _is_number(leaf)]

    def _rescaled(self, gradients: Sequence[Any], result: StepResult) -> list[Any]:
        if result.scale is None:
            return list(gradients)
        present = keras_compat.loss_scaler(self._model.optimizer).dynamic_scale
        factor = tf.convert_to_tensor(present) / result.scale
        return [
            None if gradient is None else scale(gradient, tf.cast(factor, gradient.dtype))
            for gradient in gradients
        ]


def _is_number(leaf: Any) -> bool:
    return bool(tf.convert_to_tensor(leaf).shape.rank == 0)
