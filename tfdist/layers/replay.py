"""Runs a part of a model now, and again in the backward pass, in place of keeping its activations.

Problem: back-propagation needs the activations of the forward pass, so the memory of training grows with depth.
Computing them again when they are needed trades that memory for the time of one more forward pass. In Keras, on
TensorFlow, `tf.recompute_grad` and `keras.remat` do that wrongly for all but the simplest layers; see
`keras_compat.replay_scopes`.

Solution: one `tf.custom_gradient` with everything that is differentiated as an explicit input: tensors, masks, and
the values of the variables, read once, so that the second run can't see an update. The first run is recorded
without a tape; the second one, under a tape of its own, gets the same values, tied to all incoming gradients
(`barrier`).

Source: Griewank 1992, "Achieving logarithmic growth of temporal and spatial complexity in reverse automatic
differentiation"; Chen et al. 2016, "Training deep nets with sublinear memory cost".
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import tensorflow as tf

from tfdist.keras_compat.replay_scopes import (
    CallState,
    RecordingScope,
    ReplayScope,
    UnknownVariable,
    build_symbolically,
    is_watched,
    read,
    state_of,
)
from tfdist.layers.barrier import tie
from tfdist.layers.remembering import giving, keeping
from tfdist.layers.tensor_leaves import TensorLeaves
from tfdist.layers.unreplayable import refusing_unreplayable

T = TypeVar("T")
# Variables of other layers that a layer turned out to read, such as a shared embedding.
_also_read: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
# Layers that were given the chance to build what is inside them.
_built: weakref.WeakSet[Any] = weakref.WeakSet()


class Replayed(NamedTuple):
    """What came of the first run.

    Attributes:
        outputs: as the call returned them.
        losses: that layers added on the way.
    """

    outputs: Any
    losses: list[Any]


def replay(layer: Any, call: Callable[..., Any], args: Any, kwargs: Any, *, layers: Any = ()) -> Replayed:
    """Calls `call(*args, **kwargs)`; the backward pass calls it again.

    Assigns what the first run assigned; the caller adds the losses to where they belong.

    Args:
        layer: whose code it is: its variables are read, and messages name it.
        call: what computes; the same again for the same variables, arguments and seeds.
        args: positional arguments, nested at will.
        kwargs: keyword arguments.
        layers: those that `call` uses, if they aren't all of the layers in `layer`.

    Raises:
        ValueError: `call` does what can't be done again.
    """
    return knowing_variables(
        layer,
        list(layers) or [layer],
        call,
        args,
        kwargs,
        lambda variables: _Replay(layer, call, TensorLeaves((args, kwargs)), variables).run(),
    )


def knowing_variables(
    layer: Any,
    layers: Sequence[Any],
    call: Callable[..., Any],
    args: Any,
    kwargs: Any,
    attempt: Callable[[list[Any]], T],
) -> T:
    """Calls `attempt` with all variables that `call` reads, which exist by then."""
    if layer not in _built and not all(each.built for owner in layers for each in owner._flatten_layers()):
        build_symbolically(call, args, kwargs)
    _built.add(layer)
    while True:
        found = [variable for owner in layers for variable in state_of(owner)] + _also_read.get(layer, [])
        variables = list({id(variable): variable for variable in found}.values())
        try:
            return attempt(variables)
        except UnknownVariable as unknown:
            # It must be an explicit input, so the recording starts again.
            if any(unknown.variable is variable for variable in variables):
                raise
            _also_read.setdefault(layer, []).append(unknown.variable)


class _Replay:
    """One call of a layer."""

    def __init__(
        self, layer: Any, call: Callable[..., Any], arguments: TensorLeaves, variables: Sequence[Any]
    ) -> None:
        self._name = f"{type(layer).__name__} {layer.name!r}"
        self._call = call
        self._arguments = arguments
        self._weights = [variable for variable in variables if is_watched(variable)]
        self._state = [(variable, read(variable)) for variable in variables if not is_watched(variable)]
        self._call_state = CallState()
        self._remembered: list[Any] = []

    def run(self) -> Replayed:
        """The first run, with the second as its gradient."""
        tensors = self._arguments.tensors
        count = len(tensors)

        @tf.custom_gradient  # type: ignore[untyped-decorator, unused-ignore]
        def first(*inputs: Any) -> Any:
            results = self._record(inputs[:count], inputs[count:])

            def second(*of_results: Any, variables: Sequence[Any] = ()) -> Any:
                # Each backward pass is one: gradients of gradients come by here several times.
                with tf.device(self._device):
                    gradients = self._replay(inputs[:count], inputs[count:], of_results)
                return (gradients, [None] * len(variables)) if variables else gradients

            return results, second

        results = first(*tensors, *(read(variable) for variable in self._weights))
        for variable, value in self._written:
            variable.assign(value)
        leaves = len(self._outputs.tensors)
        return Replayed(self._outputs.filled(results[:leaves]), list(results[leaves:]))

    def _record(self, tensors: Sequence[Any], weights: Sequence[Any]) -> tuple[Any, ...]:
        from tensorflow.python.eager import record

        values = [*zip(self._weights, weights, strict=True), *self._state]
        with (
            record.stop_recording(),
            RecordingScope(values) as scope,
            keeping(self._remembered),
            refusing_unreplayable(self._name),
        ):
            args, kwargs = self._arguments.filled([tf.identity(tensor) for tensor in tensors])
            outputs = self._call(*args, **kwargs)
        self._outputs = TensorLeaves(outputs)
        self._written = list(scope.written.values())
        results = [*self._outputs.tensors, *(tf.convert_to_tensor(loss) for loss in scope.losses)]
        self._device = _device_of(results)
        return tuple(results)

    def _replay(self, tensors: Sequence[Any], weights: Sequence[Any], of_results: Sequence[Any]) -> list[Any]:
        state = [value for _, value in self._state]
        with tf.GradientTape() as tape:
            tied = tie([*tensors, *state], of_results)
            tensors, state = tied[: len(tensors)], tied[len(tensors) :]
            weights = [tf.identity(weight) for weight in weights]
            sources = [(i, tensor) for i, tensor in enumerate([*tensors, *weights]) if _is_continuous(tensor)]
            tape.watch([source for _, source in sources])
            places = {id(variable): len(tensors) + i for i, variable in enumerate(self._weights)}

            def watch(variable: Any, value: Any) -> None:
                if id(variable) in places:
                    tape.watch(value)
                    sources.append((places[id(variable)], value))

            known = [*zip(self._weights, weights, strict=True)]
            known += [(variable, value) for (variable, _), value in zip(self._state, state, strict=True)]
            with self._call_state.restored(), ReplayScope(known, watch) as scope, giving(self._remembered):
                args, kwargs = self._arguments.filled(tensors)
                outputs = TensorLeaves(self._call(*args, **kwargs)).tensors
            results = [*outputs, *(tf.convert_to_tensor(loss) for loss in scope.losses)]
        pairs = [
            (result, gradient)
            for result, gradient in zip(results, of_results, strict=True)
            if gradient is not None and _is_continuous(result)
        ]
        found = tape.gradient(
            [result for result, _ in pairs],
            [source for _, source in sources],
            output_gradients=[gradient for _, gradient in pairs],
        )
        gradients: list[Any] = [None] * (len(tensors) + len(weights))
        for (place, _), gradient in zip(sources, found, strict=True):
            if gradient is not None:
                before = gradients[place]
                gradients[place] = (
                    gradient
                    if before is None
                    else tf.convert_to_tensor(before) + tf.convert_to_tensor(gradient)
                )
        return gradients


def _is_continuous(tensor: Any) -> bool:
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)


def _device_of(results: Sequence[Any]) -> Any:
    """Where the first run was placed by the user; TensorFlow would leave the second to chance."""
    if tf.executing_eagerly():
        from tensorflow.python.eager import context

        return context.context().device_name or None
    placed = [result.op.device for result in results if _is_continuous(result) and result.op.device]
    return placed[0] if placed else None
