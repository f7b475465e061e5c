"""Which rows of the data a rank predicts in `tfdist.predict`, and where they lie in the whole.

Problem: results must come back in the order of the input, equal to one process's to the last bit; the latter means
the same batches, since a matrix product rounds differently in another shape.

Solution: deal out whole batches. Arrays give each rank a run of consecutive batches, which costs no copy. Streams
are dealt out in turns, so that their length need not be known. A turn is what the model runs in one execution: its
rows are all that Keras tells about the batches inside.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tfdist import world
from tfdist.data.datasets import dataset_facts
from tfdist.data.marks import is_sharded, layout_of

Places = Callable[[Sequence[int]], npt.NDArray[np.int64]]
"""From the rows of each execution to a sort key for each row."""


@dataclasses.dataclass(frozen=True)
class Share:
    """What this rank predicts.

    Attributes:
        data: what its `model.predict` takes; None if nothing is left for this rank.
        places: where its rows lie in the whole.
        facts: what must be equal on all ranks.
        options: arguments for `model.predict`.
    """

    data: Any
    places: Places
    facts: dict[str, Any]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


def share_of(data: Any, batch_size: int | None, steps: int | None, execution: int) -> Share:
    for name, value in (("batch_size", batch_size), ("steps", steps)):
        if value is not None and value < 1:
            raise ValueError(f"`{name}` must be a positive number. Received: {value}.")
    if is_sharded(data):
        return _share_of_shard(data, batch_size, steps, execution)
    if isinstance(data, tf.data.Dataset):
        return _share_of_dataset(data, batch_size, steps, execution)
    if isinstance(data, keras.utils.PyDataset):
        return _share_of_py_dataset(data, batch_size, steps, execution)
    if isinstance(data, Iterator) or callable(data) or type(data).__module__.startswith("torch.utils.data"):
        raise ValueError(
            f"tfdist.predict cannot deal out a {type(data).__name__}: it can be read only in one process, and "
            "once. Give it arrays, a tf.data.Dataset or a keras.utils.PyDataset."
        )
    return _share_of_arrays(data, 32 if batch_size is None else batch_size, steps)


def _share_of_shard(data: Any, batch_size: int | None, steps: int | None, execution: int) -> Share:
    _refuse_batch_size(batch_size, "a shard brings its own batches")
    layout = layout_of(data)
    if layout.by_batch and execution > 1:
        raise ValueError(
            "tfdist.predict cannot tell the batches of a shard apart if several run in one execution. Received: a "
            f"shard of whole batches, and a model compiled with steps_per_execution={execution}. Give it the whole "
            "data instead of a shard, or compile with steps_per_execution=1."
        )
    rank = world.rank()
    return Share(data, lambda batches: layout.places(rank, batches), {"data": "a shard"}, {"steps": steps})


def _share_of_dataset(data: Any, batch_size: int | None, steps: int | None, execution: int) -> Share:
    if batch_size is not None:
        data = data.batch(batch_size)
    facts = dataset_facts(data)
    if steps is not None:
        data = data.take(steps)
    count = int(data.cardinality())
    if count == tf.data.INFINITE_CARDINALITY:
        raise ValueError(
            "tfdist.predict needs data with an end. Received: a dataset without one. Pass `steps`."
        )
    rank, ranks = world.rank(), world.current().everyone.size
    if count >= 0 and not _numbers_of_batches(count, execution):
        return Share(None, _places_of_executions, facts)
    if execution == 1:
        return Share(data.shard(ranks, rank), _places_of_executions, facts)
    mine = data.enumerate().filter(lambda number, _: number // execution % ranks == rank)
    return Share(mine.map(lambda _, batch: batch), _places_of_executions, facts)


class _Chosen(keras.utils.PyDataset):  # type: ignore[misc]  # Keras is untyped
    """Some batches of another PyDataset. Its `on_epoch_end` is not called: ranks would shuffle differently."""

    def __init__(self, inner: Any, numbers: Sequence[int]) -> None:
        super().__init__(
            workers=inner.workers,
            use_multiprocessing=inner.use_multiprocessing,
            max_queue_size=inner.max_queue_size,
        )
        self._inner = inner
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Any:
        return self._inner[self._numbers[index]]


def _share_of_py_dataset(data: Any, batch_size: int | None, steps: int | None, execution: int) -> Share:
    _refuse_batch_size(batch_size, "a PyDataset brings its own batches")
    counts = [count for count in (data.num_batches, steps) if count is not None]
    if not counts:
        raise ValueError(
            "tfdist.predict needs data with an end. Received: a PyDataset without one. Pass `steps`."
        )
    numbers = _numbers_of_batches(min(counts), execution)
    facts = {"data": type(data).__name__, "number of batches": data.num_batches}
    return Share(_Chosen(data, numbers) if numbers else None, _places_of_executions, facts)


def _share_of_arrays(data: Any, batch_size: int, steps: int | None) -> Share:
    shapes = [tuple(getattr(leaf, "shape", ())) for leaf in keras.tree.flatten(data)]
    if () in shapes or len({shape[0] for shape in shapes}) != 1:
        raise ValueError(
            "tfdist.predict takes arrays with the same number of rows, a tf.data.Dataset or a "
            f"keras.utils.PyDataset. Received: {type(data).__name__} of shapes {shapes}."
        )
    rows = int(shapes[0][0])
    batches = -(-rows // batch_size)
    if steps is not None:
        batches = min(batches, steps)
    rank, ranks = world.rank(), world.current().everyone.size
    start = batches * rank // ranks * batch_size
    stop = min(batches * (rank + 1) // ranks * batch_size, rows)
    mine = keras.tree.map_structure(lambda leaf: leaf[start:stop], data) if start < stop else None

    def places(executions: Sequence[int]) -> npt.NDArray[np.int64]:
        return np.arange(start, start + sum(executions), dtype=np.int64)

    return Share(mine, places, {"data": "arrays", "shapes": shapes}, {"batch_size": batch_size})


def _refuse_batch_size(batch_size: int | None, reason: str) -> None:
    if batch_size is not None:
        raise ValueError(
            f"`batch_size` is for arrays and datasets of samples; {reason}. Received: batch_size={batch_size}. "
            "Leave it out."
        )


def _numbers_of_batches(count: int, execution: int) -> list[int]:
    """Which of `count` batches this rank predicts: executions in turns."""
    rank, ranks = world.rank(), world.current().everyone.size
    return [number for number in range(count) if number // execution % ranks == rank]


def _places_of_executions(executions: Sequence[int]) -> npt.NDArray[np.int64]:
    numbers = np.arange(len(executions), dtype=np.int64) * world.current().everyone.size + world.rank()
    return np.repeat(numbers, executions)
