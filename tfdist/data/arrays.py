"""Shards arrays: a tf.data pipeline that gathers this rank's rows of one common order.

The result is a batched `tf.data.Dataset` rather than a `keras.utils.PyDataset`: Keras shuffles the batches of
a PyDataset with an unseeded generator of its own and may read ahead over the end of an epoch, so a PyDataset
cannot promise the same global batches on all ranks. Row numbers of a whole pass come from Python once
per pass; slicing and gathering run in tf.data's threads.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tfdist.data.plan import RowPlan, pass_order


def as_tensors(data: Any) -> Any:
    """Converts a structure of arrays to tensors, as `fit` would.

    Args:
        data: one array, or a tuple `(x,)`, `(x, y)` or `(x, y, sample_weight)`, or a dict; members may be
            nested. Everything numpy can convert is an array: numpy, pandas, jax, TensorFlow.

    Returns:
        The same structure with tensors; floating numpy arrays in Keras's float type, lists as tuples.

    Raises:
        ValueError: a member is no array, or the numbers of rows differ.
    """
    if isinstance(data, list):
        raise ValueError(
            "tfdist.shard takes the arguments of `fit` as a tuple, `(x, y)` or `(x, y, sample_weight)`. "
            f"Received a list of {len(data)}, which could mean several inputs as well. For several inputs "
            "write `((x1, x2), y)`."
        )
    if isinstance(data, tuple):
        while len(data) > 1 and data[-1] is None:
            data = data[:-1]
        if not 1 <= len(data) <= 3 or any(member is None for member in data):
            raise ValueError(
                "tfdist.shard takes `(x,)`, `(x, y)` or `(x, y, sample_weight)`. Received a tuple of "
                f"{[type(member).__name__ for member in data]}."
            )
    tensors = _convert(data)
    lengths = {int(leaf.shape[0]) for leaf in tf.nest.flatten(tensors)}
    if len(lengths) != 1:
        shapes = [tuple(leaf.shape) for leaf in tf.nest.flatten(tensors)]
        raise ValueError(f"All arrays must have the same number of rows. Received shapes: {shapes}.")
    return tensors


def rows_of(tensors: Any) -> int:
    """Number of rows that the tensors have in common."""
    return int(tf.nest.flatten(tensors)[0].shape[0])


def array_facts(tensors: Any) -> dict[str, Any]:
    """What must be equal on all ranks for their shards to be disjoint."""
    described = tf.nest.map_structure(lambda leaf: f"{leaf.dtype.name}{list(leaf.shape)}", tensors)
    return {"kind of data": "arrays", "structure and shapes": str(described)}


def shard_arrays(tensors: Any, plan: RowPlan, *, rank: int, seed: int | None, devices: int = 1) -> Any:
    """Batches of this rank's rows, in a new common order for each pass; see `tfdist.shard`.

    Args:
        tensors: what `as_tensors` returned.
        plan: who reads what.
        rank: number of this rank.
        seed: None keeps the order of the data.
        devices: how many ranks of the plan, from `rank` * `devices` on, this process reads for.

    Returns:
        A `tf.data.Dataset` of `plan.steps` batches.
    """
    numbers = row_numbers(plan, rank=rank, seed=seed, devices=devices)
    batches = numbers.map(
        lambda rows: gather(tensors, rows), num_parallel_calls=tf.data.AUTOTUNE, deterministic=True
    )
    return batches.apply(tf.data.experimental.assert_cardinality(plan.steps)).prefetch(tf.data.AUTOTUNE)


def row_numbers(plan: RowPlan, *, rank: int, seed: int | None, devices: int = 1) -> Any:
    """The numbers of the rows in each batch of `shard_arrays`, as a `tf.data.Dataset`."""
    positions, bounds = plan.joined(rank * devices, devices)
    passes = itertools.count()

    def order() -> Iterator[npt.NDArray[np.int64]]:
        yield pass_order(plan.rows, seed=seed, number=next(passes))[positions]

    def cut(rows: Any) -> Any:
        return tf.data.Dataset.range(plan.steps).map(lambda step: rows[limits[step] : limits[step + 1]])

    limits = tf.constant(bounds)
    signature = tf.TensorSpec([len(positions)], tf.int64)
    return tf.data.Dataset.from_generator(order, output_signature=signature).flat_map(cut)


def gather(tensors: Any, rows: Any) -> Any:
    """Rows of all tensors of a structure."""
    return tf.nest.map_structure(lambda tensor: tf.gather(tensor, rows), tensors)


def _convert(member: Any) -> Any:
    if isinstance(member, dict):
        return {key: _convert(value) for key, value in member.items()}
    if isinstance(member, tuple | list):
        return tuple(_convert(value) for value in member)
    if isinstance(member, tf.RaggedTensor | tf.SparseTensor):
        raise ValueError(
            f"tfdist.shard cannot slice a {type(member).__name__} by rows. Make it a dataset first: "
            "`tfdist.shard(tf.data.Dataset.from_tensor_slices((x, y)))`, then batch."
        )
    if tf.is_tensor(member):
        tensor = member
    else:
        array = np.asarray(member)
        if np.issubdtype(array.dtype, np.floating):
            array = array.astype(keras.config.floatx(), copy=False)
        try:
            tensor = tf.convert_to_tensor(array)
        except (TypeError, ValueError) as error:
            raise ValueError(
                "tfdist.shard takes a tf.data.Dataset, a keras.utils.PyDataset, or arrays. Received: "
                f"{type(member).__name__}, which numpy does not turn into an array of numbers or strings."
            ) from error
    if tensor.shape.rank == 0:
        raise ValueError(
            "tfdist.shard splits the rows of arrays, so each needs a first axis. Received a scalar: "
            f"{type(member).__name__}."
        )
    return tensor
