"""Keys of TensorFlow's collectives: equal on all ranks, whatever the order in which they trace.

Problem: TensorFlow matches collectives by two integers, a group key and an instance key. Numbering them in the
order of tracing, as its own strategies do, breaks as soon as one rank retraces (a ragged last batch) or
traces in another order: tensors meet the wrong peers or wait for ever.

Solution: a key belongs to a signature (kind, name, operation, dtype, size). The server in rank 0's control
channel hands out the integers, the same for the same signature, so no order matters, and another shape is
another key.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfdist.collectives.base import Group

if TYPE_CHECKING:
    from tfdist.control import ControlPlane


class CollectiveKeys:
    """Integers by signature, and the resources that keep calls with the same key in order."""

    def __init__(self, control: ControlPlane) -> None:
        self._control = control
        self._lock = threading.Lock()
        self._allocated: dict[str, int] = {}
        self._tokens: dict[str, Any] = {}

    def group(self, group: Group, *, device: str) -> int:
        """Group key of some ranks' devices."""
        return self._allocate(f"group {device} {group.ranks}", 1)

    def instance(self, group: Group, signature: str, *, count: int = 1) -> int:
        """First of `count` instance keys for a signature within a group."""
        return self._allocate(f"instance {group.ranks} {signature}", count)

    def token(self, key: str) -> list[Any]:
        """What a collective takes as `ordering_token`; empty when executing eagerly, where calls are ordered.

        Inside `tf.function` two runs of the same collective (a traced function that is called twice) would
        otherwise run in any order, and mix their tensors. A resource as input orders them.
        """
        if tf.executing_eagerly():
            return []
        with self._lock:
            if key not in self._tokens:
                with tf.init_scope(), tf.device("/device:CPU:0"):
                    self._tokens[key] = tf.raw_ops.VarHandleOp(
                        dtype=tf.int32, shape=[], shared_name=f"tfdist_order_{len(self._tokens)}"
                    )
            return [self._tokens[key]]

    def _allocate(self, signature: str, count: int) -> int:
        with self._lock:
            if signature in self._allocated:
                return self._allocated[signature]
        first = self._control.allocate(f"tf {signature}", count)
        with self._lock:
            return self._allocated.setdefault(signature, first)
