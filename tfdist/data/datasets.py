"""Shards a tf.data.Dataset: rank r takes elements r, r+N, r+2N, ... in complete rounds of N.

An element is whatever the dataset yields: one sample, or one batch if it was batched before. Both mean the
same to training: `shard(ds.batch(32))` and `shard(ds).batch(32)` each give a global batch of 32 * N, and the
ranks' k-th batches together are the k-th batch of `ds.batch(32 * N)` (as a set of rows).
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.data.dataset_order import order_seeds
from tfdist.data.plan import Remainder


def dataset_facts(dataset: Any) -> dict[str, Any]:
    """What must be equal on all ranks for their shards to be disjoint."""
    return {
        "kind of data": "tf.data.Dataset",
        "structure (element_spec)": _describe(dataset.element_spec),
        "number of elements (cardinality)": int(dataset.cardinality()),
        "order (seeds of shuffles)": order_seeds(dataset),
    }


def shuffle_dataset(dataset: Any, *, shuffle: bool | int, seed: int) -> Any:
    """Shuffles whole elements, anew in each pass, in an order that `seed` determines."""
    count = int(dataset.cardinality())
    if shuffle is True and count < 0:
        length = "infinite" if count == tf.data.INFINITE_CARDINALITY else "unknown"
        raise ValueError(
            "tfdist.shard(dataset, shuffle=True) shuffles over the whole dataset, so it must know its "
            f"length. Received a dataset of {length} length. Pass "
            "a buffer size instead: `shuffle=10_000`."
        )
    return dataset.shuffle(max(count, 1) if shuffle is True else int(shuffle), seed=seed)


def shard_dataset(dataset: Any, *, rank: int, ranks: int, remainder: Remainder) -> Any:
    """This rank's elements; see `tfdist.shard` for the rules."""
    count = int(dataset.cardinality())
    if 0 <= count < ranks:
        raise ValueError(
            f"tfdist.shard needs at least one element per rank. Received: a dataset of {count} elements for "
            f"{ranks} ranks. If the elements are batches, make them smaller, or shard before batching: "
            "`tfdist.shard(dataset).batch(batch_size)`."
        )
    if remainder == "keep" or count == tf.data.INFINITE_CARDINALITY:
        return dataset.shard(ranks, rank)
    if count >= 0:
        return dataset.take(count - count % ranks).shard(ranks, rank)
    return _complete_rounds(dataset, rank=rank, ranks=ranks)


def _complete_rounds(dataset: Any, *, rank: int, ranks: int) -> Any:
    """Shards a dataset of unknown length: an element counts only once its whole round of N is there."""

    def pick(*components: Any) -> Any:
        # `window` turns each component into a dataset of N elements; zip joins them again.
        structure = components[0] if len(components) == 1 else components
        return tf.data.Dataset.zip(structure).skip(rank).take(1)

    return dataset.window(ranks, drop_remainder=True).flat_map(pick)


def _describe(spec: Any) -> str:
    return str(tf.nest.map_structure(lambda leaf: str(leaf), spec))
