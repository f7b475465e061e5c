"""`accumulate_gradients`: a layer or model whose batch is processed in slices, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from tfdist.keras_compat.step_losses import tell_train_step
from tfdist.layers.decorating import decorate
from tfdist.layers.one_pass import step_in_slices
from tfdist.layers.replay import Replayed
from tfdist.layers.sliced_replay import replay_in_slices

T = TypeVar("T")


def accumulate_gradients(layer: Any = None, *, steps: int) -> Any:
    """Makes a layer or model process its batch in slices, forward and backward, and add up their gradients.

    Activations of one slice exist at a time, so their peak falls nearly `steps`-fold. What follows the layer sees
    the outputs of the whole batch: losses with any reduction, sample and class weights, masks, metrics, loss
    scaling and the optimizer's one step are those of the whole batch.

    A model that trains itself, with Keras's own `train_step` and losses that are means over the batch, does forward
    and backward pass slice by slice. Everything else (layers, models within models, loops of one's own, sums, means
    over sample weights, masked outputs) computes each slice twice, as `recompute` does. That may be used for layers
    inside, too; for large models use both. Every rank of a `DistributedOptimizer` reduces once a step, and
    `backward_passes_per_step` of that, which accumulates over batches, can be used together with it.

    BatchNormalization inside sees one slice at a time, as with a batch of that size, and updates its moving
    statistics for each; so results differ from the whole batch. Use GroupNormalization or LayerNormalization, or
    leave normalization outside. Random layers draw for each slice. Losses from `add_loss` are averaged over
    slices by their rows. Gradients of embeddings inside become dense.

    Args:
        layer: a subclass of `keras.layers.Layer` or `keras.Model`, or an instance of any; changed in place. None
            returns a decorator.
        steps: the most slices, at least 1. Batches that it doesn't divide have a smaller last slice. XLA needs
            equal ones, and takes the largest number up to `steps` that divides the batch.

    Returns:
        `layer`, or the decorator.

    Raises:
        TypeError: `layer` is none.
        ValueError: `steps` is no positive whole number; or, when it is called under a tape, what `recompute`
            refuses, outputs without a batch axis, sparse or ragged tensors, SyncBatchNormalization inside a
            graph.

    Example:
        >>> import keras, tfdist
        >>> @tfdist.layers.accumulate_gradients(steps=8)
        ... class Classifier(keras.Model):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.dense = keras.layers.Dense(10)
        ...     def call(self, x):
        ...         return self.dense(x)
        >>> encoder = keras.Sequential([keras.layers.Dense(64, activation="gelu"), keras.layers.Dense(8)])
        >>> encoder = tfdist.layers.accumulate_gradients(encoder, steps=4)

    Reference:
        Huang et al. 2019, "GPipe", for micro-batches with recomputation.
    """
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ValueError(f"`steps` is a whole number of slices, at least 1; received {steps!r}.")

    def run(layer: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Replayed:
        found = step_in_slices(layer, call, args, kwargs, steps=steps)
        return found or replay_in_slices(layer, call, args, kwargs, steps=steps)

    def decorator(layer: T) -> T:
        tell_train_step(decorate(layer, "accumulate_gradients", run))
        return layer

    return decorator if layer is None else decorator(layer)
