"""Tells data that came from `tfdist.shard` from any other, and how a shard's rows lie in the whole.

Problem: `evaluate` and `predict` of a shard are for all ranks, of other data for the rank that calls. Users
transform a shard further (`.map`, `.batch`, `.prefetch`), and the result looks like any other dataset.

Solution: `shard` marks what it returns, and a dataset is a shard if anything upstream of it is marked. With one
rank nothing is marked: a shard is the whole there.
"""

from __future__ import annotations

import dataclasses
import enum
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tfdist.data.dataset_order import upstream
from tfdist.data.plan import RowPlan
from tfdist.data.py_datasets import ShardedPyDataset

_KEEP_ORDER = {"Map", "ParallelMap", "Prefetch", "Cache", "Take", "Options", "AssertCardinality"}
_BATCH = {"Batch", "ParallelBatch", "PaddedBatch"}


@dataclasses.dataclass(frozen=True)
class Mark:
    """What `shard` did.

    Attributes:
        ranks: how many ranks share the data.
        in_order: whether the order of the whole data was kept.
        plan: who reads which rows, if arrays were sharded; otherwise element `i` of rank `r` is element
            `i * ranks + r` of the whole.
    """

    ranks: int
    in_order: bool
    plan: RowPlan | None = None


_marks: weakref.WeakKeyDictionary[Any, Mark] = weakref.WeakKeyDictionary()


def mark(dataset: Any, made: Mark) -> Any:
    """Remembers that `dataset` is a shard; returns it."""
    _marks[dataset] = made
    return dataset


def mark_like(dataset: Any, shard: Any) -> Any:
    """Marks `dataset`, which was made of a shard, as that shard was; returns it."""
    return mark(dataset, next(_marks[stage] for stage in upstream(shard) if stage in _marks))


def is_sharded(data: Any) -> bool:
    """Whether `data` came from `tfdist.shard`, in a world of several ranks, transformed since or not."""
    if isinstance(data, ShardedPyDataset):
        return data.ranks > 1
    return isinstance(data, tf.data.Dataset) and any(stage in _marks for stage in upstream(data))


class Dealt(enum.Enum):
    """What an element of a shard is, where several devices of a process compute."""

    TO_PROCESS = "a batch for all devices of the process"
    TO_DEVICE = "a batch for one device, or a sample of one"


_dealt: weakref.WeakKeyDictionary[Any, Dealt] = weakref.WeakKeyDictionary()


def deal(dataset: Any, how: Dealt) -> Any:
    """Remembers what an element of `dataset` is; returns it."""
    _dealt[dataset] = how
    return dataset


def dealt(dataset: Any) -> Dealt | None:
    """What an element is of a dataset that came from `shard`, transformed since or not; None of any other."""
    return next((_dealt[stage] for stage in upstream(dataset) if stage in _dealt), None)


def batch_size_of(dataset: Any) -> int | None:
    """Rows of a full batch of `dataset`, if its last batching tells and leaves rows of equal shapes."""
    for stage in upstream(dataset):
        kind = type(stage).__name__.strip("_").removesuffix("Dataset")
        if kind in _BATCH:
            size = tf.get_static_value(getattr(stage, "_batch_size", None)) if kind != "PaddedBatch" else None
            return None if size is None else int(size)
        if kind not in _KEEP_ORDER | {"Shard", "Shuffle", "Repeat"}:
            return None
    return None


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the rows of a shard lie in the whole data.

    Attributes:
        ranks: how many ranks share the data.
        by_batch: whether whole batches were dealt out in turns, rather than rows.
        plan: places of rows, if arrays were sharded.
    """

    ranks: int
    by_batch: bool
    plan: RowPlan | None = None

    def places(self, rank: int, batches: Sequence[int]) -> npt.NDArray[np.int64]:
        """Sort keys of this rank's rows: the rows of all ranks, sorted by them, are in the order of the whole.

        Args:
            rank: number of this rank.
            batches: rows of each batch that this rank has read.

        Returns:
            int64 `[rows of this rank]`.
        """
        if self.plan is not None:
            return self.plan.positions(rank)[: sum(batches)]
        if self.by_batch:
            return np.repeat(np.arange(len(batches), dtype=np.int64) * self.ranks + rank, batches)
        return np.arange(sum(batches), dtype=np.int64) * self.ranks + rank


def layout_of(data: Any) -> Layout:
    """How the rows of a shard lie in the whole data.

    Raises:
        ValueError: the shard was shuffled, or what was done to it since may have changed the order.
    """
    if isinstance(data, ShardedPyDataset):
        return Layout(data.ranks, by_batch=True)
    stages: list[str] = []
    for stage in upstream(data):
        if stage in _marks:
            return _layout_behind(stages, _marks[stage])
        stages.append(type(stage).__name__.strip("_").removesuffix("Dataset"))
    raise ValueError(f"Not a shard. Received: {type(data).__name__.strip('_')}. Make it with tfdist.shard.")


def _layout_behind(stages: list[str], made: Mark) -> Layout:
    """The layout behind `stages`, listed from the end of the pipeline."""
    if not made.in_order:
        raise ValueError(
            "tfdist.predict returns results in the order of the input, which a shuffled shard has lost. Received: "
            "a shard that tfdist.shard shuffled. Make it with `shuffle=False`."
        )
    batchings = [stage for stage in stages if stage in _BATCH]
    if any(stage not in _KEEP_ORDER | _BATCH for stage in stages) or len(batchings) > (made.plan is None):
        raise ValueError(
            "tfdist.predict must know where a shard's rows lie in the whole. Behind tfdist.shard it understands "
            "map, prefetch, cache, take, options, and one batch of single samples. Received a shard followed by "
            f"{', '.join(reversed(stages))}. Apply these before tfdist.shard, or give tfdist.predict the whole "
            "data."
        )
    return Layout(made.ranks, by_batch=made.plan is None and not batchings, plan=made.plan)
