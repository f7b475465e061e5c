"""Arrays that every worker holds, so that a batch is the numbers of its rows.

The chief deals out each row once in an epoch, to whichever worker is free; no other worker reads it then. So which
rows are a worker's is settled batch by batch, not beforehand: a slow worker gets fewer, and what a lost one had is
read by another. Sent once, an array costs a worker its size in memory, as it costs each rank of a ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.data.arrays import gather
from tfdist.data.row_sources import RowSource

LARGEST = 1 << 30
"""Bytes that are sent in one message; larger arrays stay with the chief, which sends the rows."""


class HeldArrays:
    """Copies of a shard's arrays on the workers, each made when it is first needed.

    Args:
        source: of the shard.

    Attributes:
        element_spec: how a batch of its rows looks.
        spec: describes the arrays, flat.
    """

    def __init__(self, source: RowSource) -> None:
        self.element_spec = source.element_spec
        self._structure = source.tensors
        self._tensors = tf.nest.flatten(source.tensors)
        self._copies: dict[int, list[Any]] = {}
        self.spec = [tf.TensorSpec.from_tensor(tensor) for tensor in self._tensors]

    def on(self, worker: int) -> list[Any]:
        """The arrays on a worker, in whose scope it is called; one thread calls it for one worker."""
        if worker not in self._copies:
            self._copies[worker] = [tf.identity(tensor) for tensor in self._tensors]
        return self._copies[worker]

    def rows(self, tensors: Sequence[Any], numbers: Any) -> Any:
        """A batch, within a graph that has the arrays as `tensors`."""
        return gather(tf.nest.pack_sequence_as(self._structure, list(tensors)), numbers)
