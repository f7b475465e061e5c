"""Forward and backward pass of each slice in one loop, for a model whose loss is the mean over its rows.

Problem: a model doesn't know its loss while it is called, so `sliced_replay` computes every slice twice.

Solution: in a stock training step the loss is known (`step_losses`). The first loop does the backward pass of each
slice right away, and keeps the sum of the gradients of the weights, weighted by rows; the custom gradient hands it
out. What the step multiplies its loss with (loss scaling, the number of replicas) arrives as the gradient of
one more added loss, which is zero. The step itself stays Keras's: it sees the outputs of the whole batch, for
losses, metrics and the update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.keras_compat.replay_scopes import RecordingScope, read
from tfdist.keras_compat.step_losses import mean_loss_of, told
from tfdist.layers.replay import Replayed, knowing_variables
from tfdist.layers.sliced_replay import Loops
from tfdist.layers.slices import Slices
from tfdist.layers.tensor_leaves import TensorLeaves, holds_composite


def step_in_slices(
    model: Any, call: Callable[..., Any], args: Any, kwargs: Any, *, steps: int
) -> Replayed | None:
    """As `replay_in_slices`, in one pass; None where that isn't possible.

    Args:
        model: the model that trains itself.
        call: what computes.
        args: positional arguments, the inputs.
        kwargs: keyword arguments.
        steps: the most slices.
    """
    known = told(model, args[0] if len(args) == 1 else None)
    if known is None or tf.executing_eagerly() or holds_composite((args, kwargs, known)):
        return None
    arguments, targets = TensorLeaves((args, kwargs)), TensorLeaves(known)
    slices = Slices(arguments.tensors[0], steps)
    if not all(slices.belongs(tensor) for tensor in targets.tensors):
        return None

    def attempt(variables: list[Any]) -> Replayed | None:
        return _OnePass(model, call, arguments, variables, slices).run_with(targets)

    return knowing_variables(model, [model], call, args, kwargs, attempt)


class _OnePass(Loops):
    """One call of a model in its training step."""

    def run_with(self, targets: TensorLeaves) -> Replayed | None:
        """The loop, with the gradients that it found; None where slices don't weigh by their rows."""
        if self._outputs.masked:
            return None
        loss = mean_loss_of(self._layer, targets.structure[0], self._outputs.structure)
        if loss is None:
            return None
        # Gradients of half floats vanish unless the loss is scaled before, not after.
        scale = self._layer.optimizer.scale_loss(tf.constant(1.0))

        @tf.custom_gradient  # type: ignore[untyped-decorator, unused-ignore]
        def run(*weights: Any) -> Any:
            results, sums = self._both_passes(weights, loss, targets, scale)

            def gradient(*of_results: Any, variables: Sequence[Any] = ()) -> Any:
                factor = of_results[-1] / scale
                found = [total * tf.cast(factor, total.dtype) for total in sums]
                return (found, [None] * len(variables)) if variables else found

            return (*results, tf.constant(0.0)), gradient

        *results, carrier = run(*(read(variable) for variable in self._weights))
        outputs, losses = self._take(results)
        return Replayed(outputs, [*(tf.stop_gradient(each) for each in losses), carrier])

    def _both_passes(
        self, weights: Sequence[Any], loss: Callable[[Any, Any, Any], Any], targets: TensorLeaves, scale: Any
    ) -> tuple[list[Any], list[Any]]:
        slices = self._slices
        tensors = self._arguments.tensors
        prepared = [slices.prepared(each) if slices.belongs(each) else each for each in tensors]
        prepared_targets = [slices.prepared(each) for each in targets.tensors]

        def body(number: Any, state: Any, sums: Any, outputs: Any, losses: Any) -> Any:
            with tf.GradientTape() as tape:
                own = [tf.identity(weight) for weight in weights]
                tape.watch(own)
                known = [*zip(self._weights, own, strict=True), *self._fixed]
                known += [
                    (variable, value) for (variable, _), value in zip(self._changing, state, strict=True)
                ]
                with self._call_state.restored(), RecordingScope(known) as scope:
                    args, kwargs = self._arguments.filled(self._pieces(tensors, prepared, number))
                    result = self._call_on(number)(*args, **kwargs)
                    y, sample_weights = targets.filled(
                        [slices.piece(each, number) for each in prepared_targets]
                    )
                    value = tf.cast(loss(y, result, sample_weights), tf.float32)
                added = [tf.convert_to_tensor(each) for each in scope.losses]
                value += sum(tf.reduce_sum(tf.cast(each, tf.float32)) for each in added)
                share = slices.share(number)
                value *= share * scale
            found = tape.gradient(value, own, unconnected_gradients=tf.UnconnectedGradients.ZERO)
            sums = [total + tf.convert_to_tensor(each) for total, each in zip(sums, found, strict=True)]
            leaves = TensorLeaves(result).tensors
            outputs = [array.write(number, each) for array, each in zip(outputs, leaves, strict=True)]
            losses = [
                total + each * tf.cast(share, each.dtype) for total, each in zip(losses, added, strict=True)
            ]
            state = [scope.get_current_value(variable) for variable, _ in self._changing]
            return number + 1, state, sums, outputs, losses

        start = [
            tf.constant(0),
            [tf.identity(value) for _, value in self._changing],
            [tf.zeros_like(weight) for weight in weights],
            [slices.array(each.dtype, each.shape) for each in self._outputs.tensors],
            [tf.zeros([], dtype) for dtype in self._losses],
        ]
        _, state, sums, outputs, losses = self._loop(body, start)
        return [*self._joined(outputs), *losses, *state], sums
