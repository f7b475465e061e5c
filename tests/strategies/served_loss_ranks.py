"""What each rank runs in the tests of the loss that a server computes."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.distributed import bodies, models
from tfdist import world


class Contrastive(keras.losses.Loss):
    """Rows of a class shall be alike, and unlike all others: each row's loss needs the whole batch."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        alike = keras.ops.matmul(y_pred, keras.ops.transpose(y_pred))
        labels = keras.ops.reshape(y_true, [-1])
        same = keras.ops.cast(labels[:, None] == labels[None, :], alike.dtype)
        return keras.ops.logsumexp(alike, axis=1) - keras.ops.sum(alike * same, 1) / keras.ops.sum(same, 1)


class OwnLoss(keras.Model):
    """Overrides `compute_loss`; `reads` makes it use weights there."""

    def __init__(self, *args: Any, reads: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)
        self.reads = reads

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        loss = keras.ops.mean(Contrastive(reduction=None)(y, y_pred))
        loss += keras.ops.sum(self.losses)
        if self.reads:
            loss *= keras.ops.exp(self.layers[-1].bias[0])
        return loss


def _model(kind: str) -> Any:
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(8, activation="tanh", kernel_regularizer="l2")(inputs)
    outputs = keras.layers.Dense(4)(hidden)
    if kind == "two outputs":
        return keras.Model(inputs, {"a": outputs, "b": keras.layers.Dense(3)(hidden)})
    if kind in ("own", "reads"):
        return OwnLoss(inputs, outputs, reads=kind == "reads")
    return keras.Model(inputs, outputs)


def trained(kind: str, strategy: str, policy: str = "float32", **options: Any) -> dict[str, Any]:
    """Trains with a contrastive loss: N ranks with their shares, or one with the global batch.

    Args:
        kind: `plain`, `two outputs`, `weighted`, `own`, `reads`, `uneven`, `eager` or `xla`.
        strategy: with which optimizers update.
        policy: the model's dtypes.
    """
    keras.utils.set_random_seed(3)
    keras.config.set_dtype_policy(policy)
    try:
        model = _model(kind)
    finally:
        keras.config.set_dtype_policy("float32")
    size, rank = tfdist.size(), tfdist.rank()
    with bodies.under(strategy if size > 1 else "ring"):
        replicas, replica = tfdist.replicas(), world.replica() if size > 1 else 0
        optimizer = bodies.wrap(keras.optimizers.Adam(0.01, global_clipnorm=0.5))
    loss: Any = Contrastive()
    if kind == "two outputs":
        loss = {"a": loss, "b": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}
    model.compile(
        optimizer,
        None if kind in ("own", "reads") else loss,
        run_eagerly=kind == "eager",
        jit_compile=kind == "xla" and size > 1,
    )
    x, y = models.data("dense")
    weights = np.linspace(0.5, 1.5, len(x)).astype("float32") if kind == "weighted" else None
    batch = models.GLOBAL_BATCH
    if kind == "uneven":
        # The last rank has a quarter of each batch less than its part, and misses the last one.
        take = np.ones(len(x), bool)
        place = np.arange(len(x)) % batch
        take[place >= batch - 2] = False
        if size > 1:
            take &= place * size // batch == rank
            if rank == size - 1:
                take[-batch:] = False
            batch = int(take[:batch].sum())
        else:
            missing = np.arange(len(x)) >= len(x) - batch
            take[missing & (place * 2 // batch == 1)] = False
            batch -= 2
        x, y = x[take], y[take]
    elif size > 1 and replica is not None:
        x, y = (models.part(values, replica, replicas) for values in (x, y))
        weights = None if weights is None else models.part(weights, replica, replicas)
        batch //= replicas
    targets = {"a": y, "b": y} if kind == "two outputs" else y
    data = tf.data.Dataset.from_tensor_slices(
        (x, targets) if weights is None else (x, targets, weights)
    ).batch(batch)
    if replica is None:
        data = data.take(0)
    before = bodies.weights_of(model)
    history = model.fit(data, epochs=2, verbose=0, shuffle=False).history
    return bodies.outcome(model, before) | {"loss": history["loss"]}


def refused(strategy: str) -> str:
    """What comes of a loss that reads weights itself."""
    try:
        trained("reads", strategy)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
