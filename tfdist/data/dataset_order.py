"""Finds what would give each rank its own order of a tf.data.Dataset.

Problem: dealing out elements by their number (rank r takes r, r+N, r+2N, ...) is disjoint only if every rank
enumerates the same order. `dataset.shuffle(1000)` without a seed draws a new order in each process, so ranks
would share some samples and never see others: no error, just a worse model.

Solution: walk the pipeline upstream and look at every source of order: seeds of shuffles and of random
choices, and parallel stages that may answer out of order. TensorFlow has no public way to read these, so this
file reads the attributes that tf.data's own classes keep (`_seed`, `_seed2`, `_deterministic`, `_map_func`;
TensorFlow 2.16 to 2.21). A stage without them is taken to be ordered.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

_SHUFFLE_OPS = {
    "ShuffleDataset": (2, 3),
    "ShuffleDatasetV3": (2, 3),
    "ShuffleAndRepeatDataset": (2, 3),
    "ShuffleAndRepeatDatasetV2": (2, 3),
}
"""TensorFlow op type -> positions of its inputs `seed` and `seed2`."""


def order_seeds(dataset: Any) -> list[list[int]]:
    """Seeds of everything that shuffles in the pipeline; equal lists mean equal orders.

    Args:
        dataset: a `tf.data.Dataset`.

    Returns:
        One `[seed, seed2]` per shuffling stage, from the end of the pipeline to its source.

    Raises:
        ValueError: a stage has no seed, or may answer out of order.
    """
    if dataset.options().deterministic is False:
        raise ValueError(_out_of_order("the dataset's option `deterministic` is False"))
    seeds = []
    for stage in upstream(dataset):
        kind = type(stage).__name__.strip("_")
        if getattr(stage, "_deterministic", None) == "false":
            raise ValueError(_out_of_order(f"the stage {kind} has `deterministic=False`"))
        for pair in _seeds_of(stage):
            if pair == [0, 0]:
                raise ValueError(
                    "tfdist.shard needs the same order of elements on every rank, but the dataset is "
                    f"shuffled without a seed ({kind}): each rank would draw its own order, and shards "
                    "would overlap. Give the shuffle a seed, `dataset.shuffle(buffer_size, seed=1)`, or "
                    "leave it out and let tfdist shuffle: `tfdist.shard(dataset, shuffle=buffer_size)`."
                )
            seeds.append(pair)
    return seeds


def _out_of_order(cause: str) -> str:
    return (
        "tfdist.shard needs the same order of elements on every rank, but this dataset may answer out of "
        f"order: {cause}. Set it to True, or shard first and apply the parallel stage to the shard."
    )


def upstream(dataset: Any) -> Iterator[Any]:
    """The dataset and everything it reads from, each once."""
    seen: set[int] = set()
    pending = [dataset]
    while pending:
        stage = pending.pop()
        if id(stage) in seen:
            continue
        seen.add(id(stage))
        yield stage
        pending.extend(stage._inputs())


def _seeds_of(stage: Any) -> Iterator[list[int]]:
    if hasattr(stage, "_seed") and hasattr(stage, "_seed2"):
        yield [_number(stage._seed), _number(stage._seed2)]
    function = getattr(getattr(stage, "_map_func", None), "function", None)
    if function is None:
        return
    for operation in function.graph.get_operations():  # datasets made per element, by interleave and flat_map
        if operation.type in _SHUFFLE_OPS:
            yield [_number(operation.inputs[place]) for place in _SHUFFLE_OPS[operation.type]]


def _number(value: Any) -> int:
    """A constant's value; -1 for one that only the running pipeline knows."""
    static = tf.get_static_value(value)
    return -1 if static is None else int(static)
