"""A worker's half of a training step: from a batch to what shall be applied, which it leaves on the servers.

The train step is traced with all writes kept back and its updates captured (`keras_compat`), so a worker changes
nothing. What it has computed goes to the servers, each gradient to the one that keeps its variable, and stays there
as the function's outputs until the chief has it applied. So a worker may die at any moment: its step either is
there completely, or is done again by another, and is applied once.

Many small tensors to one server travel as one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist import keras_compat
from tfdist.asynchronous.held_arrays import HeldArrays
from tfdist.errors import OutOfSyncError

_SMALL = 1 << 18  # bytes up to which copying a tensor costs less than a message of its own


@dataclasses.dataclass
class StepResult:
    """What a step has computed, as tensors within a graph.

    Attributes:
        gradients: for each update, the optimizer, the gradients (dense, sparse or None) and their variables.
        changes: other variables, and by how much they change.
        scale: the factor of the loss that the gradients still have; None without.
        logs: what the step returned beside the model's metrics.
    """

    gradients: list[tuple[Any, list[Any], list[Any]]]
    changes: list[tuple[Any, Any]]
    scale: Any
    logs: dict[str, Any]


class WorkerStep:
    """One kind of step of one model, traced once per shape of batch.

    Args:
        model: built, in the scope.
        run: `model.train_step`.
        arrays: what the workers hold, if a batch is the numbers of its rows.
    """

    def __init__(self, model: Any, run: Callable[[Any], Any], arrays: HeldArrays | None = None) -> None:
        self._model = model
        self._run = run
        self._arrays = arrays
        self._function: Any = None
        self._layout: list[Any] = []

    def __call__(self, batch: Sequence[Any], worker: int) -> Any:
        """Computes a step on the device of the scope that it is called in.

        Args:
            batch: its tensors, flat.
            worker: number of the worker whose device that is.

        Returns:
            Tensors on the servers, which `unpack` understands.
        """
        return self._function(*batch, *(self._arrays.on(worker) if self._arrays else ()))

    def prepare(self, structure: Any, spec: Sequence[Any]) -> None:
        """Traces the step for batches of this kind; call it once, before others.

        Args:
            structure: how a batch is nested.
            spec: describes its tensors.
        """
        changed = [each for each in self._model.non_trainable_variables if len(each.shape) <= 1]
        scaler = keras_compat.loss_scaler(getattr(self._model, "optimizer", None))
        changed += [scaler.dynamic_scale] if scaler is not None else []
        while True:
            try:
                self._trace(structure, spec, changed, scaler)
            except keras_compat.ReadTwice as unknown:
                changed.append(unknown.variable)
            else:
                return

    def _trace(self, structure: Any, spec: Sequence[Any], changed: Sequence[Any], scaler: Any) -> None:
        arrays = self._arrays
        nothing = [leaf is None for leaf in tf.nest.flatten(structure, expand_composites=True)]

        def step(*batch: Any) -> Any:
            tensors = iter(batch)
            leaves = [None if absent else next(tensors) for absent in nothing]
            data = tf.nest.pack_sequence_as(structure, leaves, expand_composites=True)
            if arrays is not None:
                data = arrays.rows(list(tensors), data.rows)
            return self._leave_on_servers(self._result(data, changed, scaler))

        signature = [*spec, *(arrays.spec if arrays is not None else ())]
        self._function = tf.function(step, input_signature=signature, autograph=False)
        self._function.get_concrete_function()

    def _result(self, batch: Any, changed: Sequence[Any], scaler: Any) -> StepResult:
        model = self._model
        measured = [each for metric in model.metrics for each in metric.variables]
        scope = keras_compat.KeptBack(empty=measured, changed=changed)
        with scope, keras_compat.capture_updates() as updates:
            logs = self._run(batch)
        trained = {id(variable) for _, _, variables in updates for variable in variables}
        for variable, _ in scope.changes:
            if id(variable) in trained:
                raise OutOfSyncError(
                    f"The train_step of {type(model).__name__} assigns the weight {variable.path!r} itself, beside "
                    "the optimizer's update. Workers send gradients and let the servers update: use an optimizer."
                )
        metrics = set(model.get_metrics_result())
        scale = None if scaler is None or not updates else scope.value_read(scaler.dynamic_scale)
        reported = logs if isinstance(logs, Mapping) else {}
        own = {name: value for name, value in reported.items() if name not in metrics}
        return StepResult(list(updates), scope.changes, scale, own)

    def _leave_on_servers(self, result: StepResult) -> list[Any]:
        """The outputs of the step's graph; notes in `_layout` what each of them is."""
        packs: dict[tuple[str, tf.DType], list[Any]] = {}
        outputs: list[Any] = []

        def send(tensor: Any, device: str) -> Any:
            if tensor.shape.is_fully_defined() and tensor.shape.num_elements() * tensor.dtype.size <= _SMALL:
                pack = packs.setdefault((device, tensor.dtype), [])
                pack.append(tensor)
                return (device, tensor.dtype, len(pack) - 1)
            with tf.device(device):
                outputs.append(tf.identity(tensor))
            return len(outputs) - 1

        def send_gradient(gradient: Any, variable: Any) -> Any:
            if gradient is None:
                return None
            device = variable.value.device
            if isinstance(gradient, tf.IndexedSlices):
                return send(gradient.values, device), send(gradient.indices, device)
            return send(gradient, device)

        first = self._model.variables[0].value.device
        gradients = [
            (optimizer, [send_gradient(*pair) for pair in zip(values, variables, strict=True)], variables)
            for optimizer, values, variables in result.gradients
        ]
        changes = [(variable, send(amount, variable.value.device)) for variable, amount in result.changes]
        scale = None if result.scale is None else send(result.scale, first)
        logs = {name: send(tf.convert_to_tensor(value), first) for name, value in result.logs.items()}
        places, sizes = {}, {}
        for (device, dtype), tensors in packs.items():
            places[device, dtype] = len(outputs)
            sizes[device, dtype] = [tensor.shape for tensor in tensors]
            packed = tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0)
            with tf.device(device):
                outputs.append(tf.identity(packed))
        self._layout = [gradients, changes, scale, logs, places, sizes]
        return outputs

    def unpack(self, outputs: Sequence[Any]) -> StepResult:
        """What `__call__` has returned, within another graph."""
        gradients, changes, scale, logs, places, sizes = self._layout
        unpacked = {}
        for key, place in places.items():
            with tf.device(key[0]):
                shapes = sizes[key]
                parts = tf.split(outputs[place], [shape.num_elements() for shape in shapes])
                unpacked[key] = [tf.reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)]

        def take(where: Any) -> Any:
            return outputs[where] if isinstance(where, int) else unpacked[where[:2]][where[2]]

        def take_gradient(where: Any, variable: Any) -> Any:
            if where is None:
                return None
            if isinstance(where, tuple) and len(where) == 2:
                return tf.IndexedSlices(take(where[0]), take(where[1]), tf.constant(list(variable.shape)))
            return take(where)

        return StepResult(
            [
                (optimizer, [take_gradient(*pair) for pair in zip(found, variables, strict=True)], variables)
                for optimizer, found, variables in gradients
            ],
            [(variable, take(where)) for variable, where in changes],
            None if scale is None else take(scale),
            {name: take(where) for name, where in logs.items()},
        )
