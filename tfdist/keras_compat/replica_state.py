"""State that layers change in the forward pass, such as moving statistics, under a strategy (Keras >= 3.3).

Problem: Keras gives such variables no aggregation. Under MirroredStrategy and MultiWorkerMirroredStrategy every
replica then follows its own data, workers drift apart (by 0.1 in a small model), and what is saved is the
first replica's; under CentralStorageStrategy the assignment raises. Random states are equal on all replicas, which
therefore draw equal dropout masks.

`int(optimizer.iterations)` raises as well, since TensorFlow's variables of several copies are no numbers.

Solution: each replica assigns its own copy, and the float variables that it has assigned are noted; whoever
combines gradients averages them with these, in the same message. Seeds differ by the number of the replica.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

_SEED_STRIDE = 1_000_003


class _Noted(threading.local):
    variables: dict[int, Any] | None = None


_noted = _Noted()


@contextlib.contextmanager
def noting_statistics() -> Iterator[None]:
    """Inside, on this thread, `noted_statistics` finds what layers assign."""
    before, _noted.variables = _noted.variables, {}
    try:
        yield
    finally:
        _noted.variables = before


def noted_statistics() -> list[Any]:
    """Takes the float variables, without gradient or aggregation, that were assigned since the last call."""
    if not _noted.variables:
        return []
    taken, _noted.variables = list(_noted.variables.values()), {}
    return taken


def note_assignment(original: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """`Variable._direct_assign` of the TensorFlow backend."""
    import tensorflow as tf

    def _direct_assign(self: Any, value: Any) -> None:
        if (
            _noted.variables is not None
            and not self.trainable
            and self.aggregation == "none"
            and self._value.dtype.is_floating
            and isinstance(self._value, tf.distribute.DistributedValues)
        ):
            _noted.variables[id(self)] = self
        original(self, value)

    return _direct_assign


def as_number(kind: type, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`Variable.__int__` and `__float__`, of variables that have copies on several devices as well."""
    import tensorflow as tf

    def convert(self: Any) -> Any:
        if self.ndim == 0 and isinstance(self._value, tf.distribute.DistributedValues):
            return kind(self.numpy())
        return original(self)

    return convert


def seed_by_replica(original: Callable[..., Any]) -> Callable[..., Any]:
    """`SeedGenerator.next`."""
    import tensorflow as tf

    def next(self: Any, *args: Any, **options: Any) -> Any:
        seed = original(self, *args, **options)
        replica = tf.distribute.get_replica_context()
        if replica is None or replica.num_replicas_in_sync == 1:
            return seed
        number = tf.cast(replica.replica_id_in_sync_group, seed.dtype)
        return seed + tf.stack([number * _SEED_STRIDE, tf.zeros_like(number)])

    return next
