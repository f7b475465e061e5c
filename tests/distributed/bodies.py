"""What each rank runs; tests send these functions into worlds and compare what the ranks return.

Every function also runs in a world of one rank, where it is the reference: plain Keras with the global batch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.distributed import models
from tfdist import keras_compat, world
from tfdist.strategies import choice


def optimizer_of(name: str, **config: Any) -> Any:
    import keras

    if name == "MultiOptimizer":
        parts = keras.optimizers.OptimizerMap(keras.optimizers.Adam(0.01))
        parts[".*bias"] = keras.optimizers.SGD(0.1)
        return keras.optimizers.MultiOptimizer(parts)
    return getattr(keras.optimizers, name)(**config)


def weights_of(model: Any) -> list[np.ndarray]:
    return [np.asarray(weight) for weight in model.get_weights()]


def digest(arrays: list[np.ndarray]) -> str:
    sha = hashlib.sha256()
    for array in arrays:
        sha.update(array.tobytes())
    return sha.hexdigest()


def outcome(model: Any, before: list[np.ndarray], optimizer: Any = None) -> dict[str, Any]:
    """Everything that must agree between ranks and with one process."""
    optimizer = optimizer or model.optimizer
    after = weights_of(model)
    kept = [keras_compat.kept_here(variable) for variable in optimizer.variables]
    slots = [np.asarray(variable) for variable in optimizer.variables]
    common = [slot for slot, here in zip(slots, kept, strict=True) if here is None]
    return {
        "weights": after,
        # None for what only another rank keeps.
        "slots": [None if here is False else slot for slot, here in zip(slots, kept, strict=True)],
        "iterations": int(optimizer.iterations),
        "digest": digest(after + common),
        "moved": [float(np.abs(a - b).max()) for a, b in zip(after, before, strict=True)],
    }


def wrap(optimizer: Any, **options: Any) -> Any:
    """The user's wrapped optimizer; the plain one in the reference run."""
    import tfdist

    return tfdist.DistributedOptimizer(optimizer, **options) if tfdist.size() > 1 else optimizer


@contextlib.contextmanager
def under(strategy: str) -> Iterator[None]:
    """Optimizers that are wrapped inside update by this strategy, whatever that of the world is."""
    before = world.current()
    dedicated = choice.dedicated(strategy) if before.spec.size > 1 else 0
    strategy = choice.check(strategy, before.spec.size)
    world.install(dataclasses.replace(before, strategy=strategy, dedicated=dedicated))
    try:
        yield
    finally:
        world.install(before)


def call_under(strategy: str, function: str, args: list[Any]) -> Any:
    """Calls a function, `module:name` in this folder, while optimizers are wrapped to update by this strategy."""
    module, name = function.split(":")
    with under(strategy):
        return getattr(importlib.import_module(f"tests.distributed.{module}"), name)(*args)


def share(values: np.ndarray, batch: int = models.GLOBAL_BATCH) -> np.ndarray:
    import tfdist

    return models.part(values, tfdist.rank(), tfdist.size(), batch)


def fit_with(args: list[Any], options: dict[str, Any]) -> dict[str, Any]:
    """`fit`, for a channel that carries no keywords."""
    return fit(*args, **options)


def fit(
    kind: str,
    optimizer: str,
    config: dict[str, Any] | None = None,
    *,
    compile_options: dict[str, Any] | None = None,
    wrap_options: dict[str, Any] | None = None,
    passes: int = 1,
    epochs: int = 1,
    policy: str | None = None,
    freeze: int | None = None,
    strategy: str = "ring",
) -> dict[str, Any]:
    """Trains in `fit()`: N ranks with their shares, or one rank with the global batch."""
    import keras

    import tfdist

    keras.utils.set_random_seed(3)
    if policy:
        keras.config.set_dtype_policy(policy)
    try:
        model = models.MODELS[kind]() if tfdist.size() > 1 else models.reference(kind)
    finally:
        keras.config.set_dtype_policy("float32")
    if freeze is not None:
        model.layers[freeze].trainable = False
    inner = optimizer_of(optimizer, **(config or {}))
    options = dict(wrap_options or {})
    if "compression" in options:
        options["compression"] = getattr(tfdist.Compression, options["compression"])
    if passes > 1 and tfdist.size() > 1:
        options["backward_passes_per_step"] = passes
    with under(strategy if tfdist.size() > 1 else "ring"):
        wrapped = wrap(inner, **options)
    model.compile(
        wrapped,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        **(compile_options or {}),
    )
    if tfdist.size() == 1:
        # ScheduleFreeAdamW copies the weights when it is built; built inside the traced step, as Keras does by
        # itself, it copies them again at every step.
        model.optimizer.build(model.trainable_variables)
    x, y = models.data(kind)
    # With k passes a rank sees k batches per update, one process one batch k times as large.
    batch = models.GLOBAL_BATCH // tfdist.size()
    if passes > 1 and tfdist.size() > 1:
        batch //= passes
    before = weights_of(model)
    model.fit(share(x), share(y), batch_size=batch, shuffle=False, epochs=epochs, verbose=0)
    return outcome(model, before, getattr(model.optimizer, "inner_optimizer", model.optimizer))
