"""Runs a part of a model on slices of its batch, in the backward pass again, so that one slice's activations exist.

Problem: a batch that doesn't fit is usually split outside of the model, and then every loss that is not a plain
mean over samples, every metric and every other reduction over the batch sees parts only.

Solution: the part of the model is split alone. One loop runs it slice by slice without keeping activations, and
joins the outputs, so what follows sees the whole batch. A second loop, in the backward pass, takes the slices
of the incoming gradient, runs each slice again under a tape (see `replay`), and adds up the gradients of the
weights. Loops with one iteration at a time, since TensorFlow would run an unrolled one all at once.

State passes from slice to slice: random layers draw other numbers for each, moving statistics are updated by each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.keras_compat.activity_losses import on_part_of_batch
from tfdist.keras_compat.replay_scopes import CallState, RecordingScope, ReplayScope, is_watched, read
from tfdist.layers.remembering import forbidding
from tfdist.layers.replay import Replayed, knowing_variables, replay
from tfdist.layers.slices import Slices
from tfdist.layers.tensor_leaves import TensorLeaves, holds_composite
from tfdist.layers.unreplayable import refusing_unreplayable

_NO_COLLECTIVES = (
    "A layer that asks other ranks (SyncBatchNormalization) can't run slice by slice inside a graph; received one "
    "inside accumulate_gradients. Use BatchNormalization there, or `run_eagerly=True`."
)


def replay_in_slices(layer: Any, call: Callable[..., Any], args: Any, kwargs: Any, *, steps: int) -> Replayed:
    """Calls `call(*args, **kwargs)` on slices of the batch; the backward pass calls it again.

    Args:
        layer: whose code it is.
        call: what computes; outputs are tensors with the batch as their first axis.
        args: positional arguments; the first tensor in them tells the batch, and tensors with as many rows are
            split.
        kwargs: keyword arguments, likewise.
        steps: the most slices.

    Returns:
        The joined outputs, and added losses averaged over slices, by their rows.

    Raises:
        ValueError: no batch, outputs without it, sparse or ragged tensors, or what can't be done again.
    """
    # In eager mode Functional models are called with arrays.
    args, kwargs = keras.tree.map_structure(
        lambda value: tf.convert_to_tensor(value) if isinstance(value, np.ndarray) else value, (args, kwargs)
    )
    arguments = TensorLeaves((args, kwargs))
    if holds_composite((args, kwargs)):
        raise ValueError(
            f"A batch with sparse or ragged tensors can't be sliced; received one in {layer.name!r}."
        )
    batch = next((tensor for tensor in arguments.tensors if tensor.shape.rank), None)
    if batch is None:
        raise ValueError(
            f"Slicing needs a tensor with a batch; received none in the arguments of {layer.name!r}."
        )
    slices = Slices(batch, steps)
    if tf.executing_eagerly():
        return _one_by_one(layer, call, arguments, slices)
    return knowing_variables(
        layer, [layer], call, args, kwargs, lambda known: Loops(layer, call, arguments, known, slices).run()
    )


def _one_by_one(layer: Any, call: Callable[..., Any], arguments: TensorLeaves, slices: Slices) -> Replayed:
    """In eager mode there is nothing to reorder or merge: a loop in Python."""
    parts: list[TensorLeaves] = []
    totals: list[Any] = []
    for number in range(slices.count):
        own = [slices.piece(each, number) if slices.belongs(each) else each for each in arguments.tensors]
        args, kwargs = arguments.filled(own)
        share = slices.share(number)
        outputs, losses = replay(layer, on_part_of_batch(layer, call, share), args, kwargs)
        losses = [loss * tf.cast(share, loss.dtype) for loss in losses]
        totals = [a + b for a, b in zip(totals, losses, strict=True)] if parts else losses
        parts.append(TensorLeaves(outputs))
    _check_outputs(layer, parts[0], outputs)
    joined = [tf.concat(pieces, 0) for pieces in zip(*(part.tensors for part in parts), strict=True)]
    return Replayed(parts[0].filled(joined), totals)


def _check_outputs(layer: Any, leaves: TensorLeaves, outputs: Any) -> None:
    if holds_composite(outputs) or not all(tensor.shape.rank for tensor in leaves.tensors):
        shapes = [tensor.shape for tensor in leaves.tensors]
        raise ValueError(
            f"What runs in slices returns dense tensors with the batch as their first axis; received outputs of "
            f"shapes {shapes} from {layer.name!r}."
        )


class Loops:
    """One call of a layer inside a graph."""

    def __init__(
        self,
        layer: Any,
        call: Callable[..., Any],
        arguments: TensorLeaves,
        variables: Sequence[Any],
        slices: Slices,
    ) -> None:
        self._layer = layer
        self._call = call
        self._arguments = arguments
        self._slices = slices
        self._weights = [variable for variable in variables if is_watched(variable)]
        self._state = [(variable, read(variable)) for variable in variables if not is_watched(variable)]
        self._call_state = CallState()
        self._rehearse()

    def _rehearse(self) -> None:
        """Finds out what comes of a slice: outputs, losses, and which variables it assigns."""
        weights = [(weight, read(weight)) for weight in self._weights]
        with (
            tf.__internal__.FuncGraph("rehearsal").as_default(),
            RecordingScope([*weights, *self._state]) as scope,
            forbidding(_NO_COLLECTIVES),
            refusing_unreplayable(f"{type(self._layer).__name__} {self._layer.name!r}"),
        ):
            args, kwargs = self._arguments.filled(self._slices.sample(self._arguments.tensors))
            outputs = self._call(*args, **kwargs)
        self._outputs = TensorLeaves(outputs)
        _check_outputs(self._layer, self._outputs, outputs)
        self._losses = [loss.dtype for loss in scope.losses]
        written = set(scope.written)
        if any(id(weight) in written for weight in self._weights):
            raise ValueError(
                f"What runs in slices can't assign weights that are trained; received {self._layer.name!r}, "
                "which does, as SpectralNormalization does. Leave that layer out."
            )
        self._fixed = [pair for pair in self._state if id(pair[0]) not in written]
        self._changing = [pair for pair in self._state if id(pair[0]) in written]

    def run(self) -> Replayed:
        """The first loop, with the second as its gradient."""
        tensors = self._arguments.tensors
        count = len(tensors)

        @tf.custom_gradient  # type: ignore[untyped-decorator, unused-ignore]
        def first(*inputs: Any) -> Any:
            results, before = self._forward(inputs[:count], inputs[count:])

            def second(*of_results: Any, variables: Sequence[Any] = ()) -> Any:
                gradients = self._backward(inputs[:count], inputs[count:], before, of_results)
                return (gradients, [None] * len(variables)) if variables else gradients

            return results, second

        return self._take(first(*tensors, *(read(variable) for variable in self._weights)))

    def _take(self, results: Sequence[Any]) -> Replayed:
        """Assigns the last state, and gives the rest."""
        leaves, losses = len(self._outputs.tensors), len(self._losses)
        for (variable, _), value in zip(self._changing, results[leaves + losses :], strict=True):
            variable.assign(tf.stop_gradient(value))
        return Replayed(self._outputs.filled(results[:leaves]), list(results[leaves : leaves + losses]))

    def _forward(self, tensors: Sequence[Any], weights: Sequence[Any]) -> tuple[tuple[Any, ...], list[Any]]:
        """Joined outputs, averaged losses and the last state; and the state before each slice."""
        from tensorflow.python.eager import record

        slices = self._slices
        prepared = [slices.prepared(each) if slices.belongs(each) else each for each in tensors]

        def body(number: Any, state: Any, befores: Any, outputs: Any, losses: Any) -> Any:
            known = [*zip(self._weights, weights, strict=True), *self._fixed]
            known += [(variable, value) for (variable, _), value in zip(self._changing, state, strict=True)]
            with self._call_state.restored(), RecordingScope(known) as scope:
                args, kwargs = self._arguments.filled(self._pieces(tensors, prepared, number))
                leaves = TensorLeaves(self._call_on(number)(*args, **kwargs)).tensors
            befores = [array.write(number, value) for array, value in zip(befores, state, strict=True)]
            outputs = [array.write(number, value) for array, value in zip(outputs, leaves, strict=True)]
            share = slices.share(number)
            losses = [
                total + tf.convert_to_tensor(loss) * tf.cast(share, loss.dtype)
                for total, loss in zip(losses, scope.losses, strict=True)
            ]
            state = [scope.get_current_value(variable) for variable, _ in self._changing]
            return number + 1, state, befores, outputs, losses

        with record.stop_recording():
            start = [
                tf.constant(0),
                [tf.identity(value) for _, value in self._changing],
                [
                    tf.TensorArray(value.dtype, slices.count, element_shape=value.shape)
                    for _, value in self._changing
                ],
                [slices.array(each.dtype, each.shape) for each in self._outputs.tensors],
                [tf.zeros([], dtype) for dtype in self._losses],
            ]
            _, state, befores, outputs, losses = self._loop(body, start)
            return (*self._joined(outputs), *losses, *state), [array.stack() for array in befores]

    def _joined(self, arrays: Sequence[Any]) -> list[Any]:
        """The outputs of the whole batch."""
        leaves = self._outputs.tensors
        return [self._slices.joined(array, each.shape) for array, each in zip(arrays, leaves, strict=True)]

    def _backward(
        self,
        tensors: Sequence[Any],
        weights: Sequence[Any],
        befores: Sequence[Any],
        of_results: Sequence[Any],
    ) -> list[Any]:
        slices = self._slices
        prepared = [slices.prepared(each) if slices.belongs(each) else each for each in tensors]
        leaves, losses = len(self._outputs.tensors), len(self._losses)
        of_outputs = [
            slices.prepared(tf.convert_to_tensor(gradient))
            if each.dtype.is_floating and gradient is not None
            else None
            for each, gradient in zip(self._outputs.tensors, of_results[:leaves], strict=True)
        ]
        of_losses = of_results[leaves : leaves + losses]
        floats = [i for i, tensor in enumerate(tensors) if tensor.dtype.is_floating]
        sliced = [i for i in floats if slices.belongs(tensors[i])]
        whole = [i for i in floats if not slices.belongs(tensors[i])]

        def body(number: Any, sums: Any, arrays: Any) -> Any:
            with tf.GradientTape() as tape:
                pieces = self._pieces(tensors, prepared, number)
                own = [tf.identity(weight) for weight in weights]
                sources = [*own, *(pieces[i] for i in whole), *(pieces[i] for i in sliced)]
                tape.watch(sources)
                known = [*zip(self._weights, own, strict=True), *self._fixed]
                known += [
                    (variable, before[number])
                    for (variable, _), before in zip(self._changing, befores, strict=True)
                ]
                with self._call_state.restored(), ReplayScope(known, _watch_nothing) as scope:
                    args, kwargs = self._arguments.filled(pieces)
                    outputs = TensorLeaves(self._call_on(number)(*args, **kwargs)).tensors
                added = [tf.convert_to_tensor(loss) for loss in scope.losses]
            pairs = [
                (output, slices.piece(gradient, number))
                for output, gradient in zip(outputs, of_outputs, strict=True)
                if gradient is not None
            ]
            share = slices.share(number)
            pairs += [
                (loss, gradient * tf.cast(share, loss.dtype))
                for loss, gradient in zip(added, of_losses, strict=True)
                if gradient is not None
            ]
            found = tape.gradient(
                [output for output, _ in pairs],
                sources,
                output_gradients=[gradient for _, gradient in pairs],
                unconnected_gradients=tf.UnconnectedGradients.ZERO,
            )
            summed, joined = found[: len(sums)], found[len(sums) :]
            sums = [total + tf.convert_to_tensor(each) for total, each in zip(sums, summed, strict=True)]
            arrays = [
                array.write(number, tf.convert_to_tensor(each))
                for array, each in zip(arrays, joined, strict=True)
            ]
            return number + 1, sums, arrays

        start = [
            tf.constant(0),
            [tf.zeros_like(each) for each in (*weights, *(tensors[i] for i in whole))],
            [slices.array(tensors[i].dtype, tensors[i].shape) for i in sliced],
        ]
        _, sums, arrays = self._loop(body, start)
        gradients: list[Any] = [None] * len(tensors)
        for i, total in zip(whole, sums[len(weights) :], strict=True):
            gradients[i] = total
        for i, array in zip(sliced, arrays, strict=True):
            gradients[i] = slices.joined(array, tensors[i].shape)
        return [*gradients, *sums[: len(weights)]]

    def _call_on(self, number: Any) -> Callable[..., Any]:
        return on_part_of_batch(self._layer, self._call, self._slices.share(number))

    def _pieces(self, tensors: Sequence[Any], prepared: Sequence[Any], number: Any) -> list[Any]:
        return [
            self._slices.piece(ready, number) if self._slices.belongs(tensor) else tf.identity(tensor)
            for tensor, ready in zip(tensors, prepared, strict=True)
        ]

    def _loop(self, body: Callable[..., Any], start: list[Any]) -> Any:
        return tf.while_loop(
            lambda number, *_: number < self._slices.count,
            body,
            start,
            parallel_iterations=1,
            maximum_iterations=self._slices.count,
        )


def _watch_nothing(variable: Any, value: Any) -> None:
    """Only state is assigned."""
