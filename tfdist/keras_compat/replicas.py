"""What is changed in Keras where `tf.distribute` places replicas, beside what every world needs.

Each file explains its faults: `atomic_assign`, `distributed_data`, `replica_state`, `replica_weights`. The
optimizer's side, `one_device`, changes nothing for good.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

from tfdist.keras_compat.atomic_assign import atomic
from tfdist.keras_compat.fit_loop import announced_predict
from tfdist.keras_compat.hook import ReplicaHook
from tfdist.keras_compat.replica_state import as_number, note_assignment, seed_by_replica
from tfdist.keras_compat.replica_weights import scale_by_rows, unscale_by_rows


class _Making(threading.local):
    slot = False


_making = _Making()


def is_slot() -> bool:
    """Whether an optimizer is making a variable of its own, on this thread."""
    return _making.slot


def patches(hook: ReplicaHook) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """Yields owner, name and replacement of each."""
    import keras
    from keras.src.backend.tensorflow import trainer
    from keras.src.backend.tensorflow.core import Variable
    from keras.src.losses import loss

    # Not at the top: it imports TensorFlow, which this package must not at its import.
    from tfdist.keras_compat import distributed_data

    for name in ("assign_add", "assign_sub"):
        yield Variable, name, atomic(name, getattr(Variable, name))
    for name, kind in (("__int__", int), ("__float__", float)):
        yield Variable, name, as_number(kind, getattr(Variable, name))
    yield Variable, "_direct_assign", note_assignment(Variable._direct_assign)
    yield keras.random.SeedGenerator, "next", seed_by_replica(keras.random.SeedGenerator.next)
    yield keras.optimizers.Optimizer, "add_variable", _telling(keras.optimizers.Optimizer.add_variable)
    yield loss, "scale_loss_for_distribution", scale_by_rows(loss.scale_loss_for_distribution)
    yield loss, "unscale_loss_for_distribution", unscale_by_rows(loss.unscale_loss_for_distribution)
    build = keras.Model._maybe_symbolic_build
    yield keras.Model, "_maybe_symbolic_build", distributed_data.build_from_spec(build)
    steps = keras.Model._make_function
    yield keras.Model, "_make_function", distributed_data.step_by_step(steps)
    yield keras.Model, "predict", announced_predict(keras.Model.predict, hook)
    yield trainer, "reduce_per_replica", distributed_data.reduce_logs_locally(trainer.reduce_per_replica)
    iterator = trainer.TFEpochIterator
    yield iterator, "__init__", distributed_data.distribute_by(iterator.__init__, hook)


def _telling(original: Callable[..., Any]) -> Callable[..., Any]:
    def add_variable(self: Any, *args: Any, **options: Any) -> Any:
        before, _making.slot = _making.slot, True
        try:
            return original(self, *args, **options)
        finally:
            _making.slot = before

    return add_variable
