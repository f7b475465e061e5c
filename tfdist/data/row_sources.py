"""What a shard of arrays was made of, for those that can do with the numbers of its rows.

Where one process deals out batches to others that hold the arrays themselves, it need not send the rows. A
shard that was transformed since is another dataset, and has no source.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist.data.arrays import row_numbers
from tfdist.data.plan import RowPlan


class RowNumbers(NamedTuple):
    """A batch, by the numbers of its rows."""

    rows: Any


@dataclasses.dataclass(frozen=True)
class RowSource:
    """Arrays, and the order in which a shard reads them.

    Attributes:
        tensors: the arrays, nested as a batch is.
        plan: who reads what.
        seed: of the order; None keeps that of the data.
    """

    tensors: Any
    plan: RowPlan
    seed: int | None

    @property
    def element_spec(self) -> Any:
        """How a batch looks."""
        return tf.nest.map_structure(
            lambda tensor: tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype), self.tensors
        )

    @property
    def bytes(self) -> int:
        """Size of all arrays; strings count as pointers."""
        return sum(
            tensor.shape.num_elements() * tensor.dtype.size for tensor in tf.nest.flatten(self.tensors)
        )

    def numbers(self) -> Any:
        """A dataset of `RowNumbers` in place of the shard's batches."""
        numbered = row_numbers(self.plan, rank=0, seed=self.seed).map(RowNumbers)
        return numbered.apply(tf.data.experimental.assert_cardinality(self.plan.steps)).prefetch(2)


_sources: weakref.WeakKeyDictionary[Any, RowSource] = weakref.WeakKeyDictionary()


def remember(shard: Any, source: RowSource) -> Any:
    """Notes what a shard was made of; returns it."""
    _sources[shard] = source
    return shard


def source_of(data: Any) -> RowSource | None:
    """What a shard of arrays was made of; None for any other data."""
    return _sources.get(data) if isinstance(data, tf.data.Dataset) else None
