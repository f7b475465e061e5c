"""The one function that users call: picks the way for the data at hand."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist import world
from tfdist.data.agreement import agree
from tfdist.data.arrays import array_facts, as_tensors, rows_of, shard_arrays
from tfdist.data.datasets import dataset_facts, shard_dataset, shuffle_dataset
from tfdist.data.marks import Dealt, Mark, deal, mark, mark_like
from tfdist.data.plan import REMAINDERS, Remainder, RowPlan
from tfdist.data.py_datasets import py_dataset_facts, shard_py_dataset
from tfdist.data.row_sources import RowSource, remember


def shard(
    data: Any,
    *,
    batch_size: int | None = None,
    shuffle: bool | int | None = None,
    seed: int | None = None,
    remainder: Remainder | None = None,
) -> Any:
    """Gives this rank its part of the data; every rank calls it with the same data and arguments.

    Shards are disjoint, and every rank takes the same number of steps. Batch sizes are per rank: with N
    ranks, the ranks' k-th batches together are the k-th batch of one process with N times the batch size.

    ```python
    model.fit(tfdist.shard((x, y), batch_size=32), validation_data=tfdist.shard((xv, yv), shuffle=False))
    model.fit(tfdist.shard(dataset.batch(32)))
    model.fit(tfdist.shard(my_py_dataset), shuffle=False)
    ```

    | data | what is dealt out | result |
    |---|---|---|
    | arrays: `x`, `(x, y)`, `(x, y, sample_weight)`, dicts, nested | rows | batched `tf.data.Dataset` |
    | `tf.data.Dataset` | elements: samples, or whole batches if batched | `tf.data.Dataset` |
    | `keras.utils.PyDataset` | its batches | `keras.utils.PyDataset` |

    Arrays are shuffled anew in each pass, in an order that depends on the seed and the number of the pass
    alone. That number counts the passes of this process, so all ranks must make the same ones: `evaluate`
    on the training shard is for every rank or none.

    Under `async_parameter_server` one process calls it, and deals the batches out to the workers as they get free.

    With one process, datasets come back as they are, arrays as batches of all rows in the same order that N
    processes share.

    Args:
        data: see the table; the whole data, not yet split by rank.
        batch_size: rows per rank and step, for arrays only; 32 by default, as in `fit`.
        shuffle: arrays: whether to shuffle, True by default. Datasets: buffer size in elements, or True for
            the whole dataset; by default not at all. A PyDataset shuffles itself in `on_epoch_end`, where
            `random` and `numpy.random` are seeded alike on every rank.
        seed: of the common order. By default rank 0 draws it from Python's `random`, so
            `keras.utils.set_random_seed` makes it reproducible.
        remainder: what happens to the rows (elements, batches) that do not divide by the number of ranks.
            "drop" leaves them out, fewer than one per rank and pass, and equals one process on the rest.
            "keep" leaves out none, for evaluation: ranks' last batches differ by one row, or, for datasets,
            ranks differ by one step. By default "keep" for arrays with `shuffle=False`, otherwise "drop".

    Returns:
        What `fit`, `evaluate` and `predict` take as `x`.

    Raises:
        ValueError: the data cannot be split so, for example a generator, a dataset shuffled without a seed,
            or fewer rows than ranks.
        OutOfSyncError: ranks hold different data or arguments.
        CollectiveTimeoutError: not every rank called.
        NotInitializedError: before `tfdist.init()`.

    Example:
        >>> import numpy as np, tfdist
        >>> tfdist.init()
        >>> x, y = np.arange(10.0).reshape(10, 1), np.arange(10)
        >>> len(tfdist.shard((x, y), batch_size=5 // tfdist.size()))
        2

    Reference:
        The rank's block of a common permutation is what torch.utils.data.DistributedSampler does; it pads
        with repeated rows where this drops.
    """
    # Where one process runs the script for all, it deals the batches out itself.
    rank, ranks = (
        (0, 1) if world.is_alone() else (world.replica(), world.replicas() // world.current().devices)
    )
    arguments: Any = {
        "batch_size": batch_size, "shuffle": shuffle, "seed": seed, "remainder": remainder,
    }  # fmt: skip
    if rank is None:  # a dedicated server reads nothing, but knows how a batch looks
        return _nothing(_shard(data, 0, ranks, **arguments))
    return _shard(data, rank, ranks, **arguments)


def _shard(
    data: Any,
    rank: int,
    ranks: int,
    *,
    batch_size: int | None,
    shuffle: bool | int | None,
    seed: int | None,
    remainder: Remainder | None,
) -> Any:
    _check_arguments(batch_size=batch_size, shuffle=shuffle, seed=seed, remainder=remainder)
    # Every rank draws, so that Python's generator stays in step; rank 0's draw counts.
    proposal = random.getrandbits(31) if seed is None else seed
    arguments = {"seed": seed, "shuffle": shuffle, "batch_size": batch_size, "remainder": remainder}

    if isinstance(data, tf.data.Dataset):
        _refuse_batch_size(batch_size, data)
        if shuffle:
            # The seed must be known before the order can be described.
            common = agree(arguments, proposal=proposal)
            data = shuffle_dataset(data, shuffle=shuffle, seed=common)
        placed = world.current().is_placed
        if world.is_alone():
            return deal(data.take(-1), Dealt.TO_DEVICE) if placed else data
        agree(arguments | dataset_facts(data), proposal=proposal)
        dealt = shard_dataset(data, rank=rank, ranks=ranks, remainder=remainder or "drop")
        if placed:
            deal(dealt, Dealt.TO_DEVICE)
        return mark(dealt, Mark(ranks, in_order=not shuffle))

    if isinstance(data, keras.utils.PyDataset):
        _refuse_batch_size(batch_size, data)
        if world.current().is_placed and world.replicas() > 1:
            raise ValueError(
                f"Under strategy {world.current().strategy} tfdist.shard deals out arrays and tf.data.Datasets; a "
                "PyDataset makes batches for one device. Make it a tf.data.Dataset, or pass it to fit() as it is, "
                "with batches for all devices."
            )
        if shuffle:
            raise ValueError(
                "tfdist.shard cannot shuffle inside a PyDataset. Received: shuffle="
                f"{shuffle!r}. Shuffle in its `on_epoch_end`; tfdist seeds it alike on every rank."
            )
        if ranks == 1 and seed is None:
            return data
        common = agree(arguments | py_dataset_facts(data), proposal=proposal)
        return shard_py_dataset(data, rank=rank, ranks=ranks, seed=common, keep=remainder == "keep")

    _refuse_streams(data)
    tensors = as_tensors(data)
    shuffled = shuffle is None or bool(shuffle)
    devices = world.current().devices
    plan = RowPlan(
        rows=rows_of(tensors),
        ranks=ranks * devices,
        batch_size=32 if batch_size is None else batch_size,
        remainder=remainder or ("drop" if shuffled else "keep"),
    )
    common = agree(arguments | array_facts(tensors), proposal=proposal)
    batches = shard_arrays(tensors, plan, rank=rank, seed=common if shuffled else None, devices=devices)
    if world.current().is_placed:
        deal(batches, Dealt.TO_PROCESS)
    if world.is_alone():
        return remember(batches, RowSource(tensors, plan, common if shuffled else None))
    return mark(batches, Mark(ranks, in_order=not shuffled, plan=plan))


def _nothing(shard: Any) -> Any:
    if not isinstance(shard, tf.data.Dataset):
        raise ValueError(
            "A dedicated server has no data, and takes part in steps only if it knows how a batch looks, which a "
            f"{type(shard).__name__} does not tell. Give tfdist.shard arrays or a tf.data.Dataset."
        )
    # Its end is found by reading: Keras refuses data of a known length of nothing.
    return mark_like(shard.take(1).filter(lambda *_: False), shard)


def _check_arguments(
    *, batch_size: int | None, shuffle: bool | int | None, seed: int | None, remainder: str | None
) -> None:
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"`batch_size` must be a positive number of rows per rank. Received: {batch_size}.")
    if shuffle is not None and shuffle < 0:
        raise ValueError(f"`shuffle` must be a bool or a positive buffer size. Received: {shuffle}.")
    if seed is not None and seed < 0:
        raise ValueError(f"`seed` must be a non-negative integer. Received: {seed}.")
    if remainder is not None and remainder not in REMAINDERS:
        raise ValueError(f"`remainder` must be one of {', '.join(REMAINDERS)}. Received: {remainder!r}.")


def _refuse_batch_size(batch_size: int | None, data: Any) -> None:
    if batch_size is not None:
        raise ValueError(
            f"`batch_size` is for arrays; a {type(data).__name__.strip('_')} brings its own batches. "
            f"Received: batch_size={batch_size}. Write `tfdist.shard(dataset.batch({batch_size}))`."
        )


def _refuse_streams(data: Any) -> None:
    if type(data).__module__.startswith("torch.utils.data"):
        raise ValueError(
            "tfdist.shard cannot split a torch DataLoader. Give the loader a "
            "`torch.utils.data.DistributedSampler(data, num_replicas=tfdist.size(), rank=tfdist.rank())` "
            "and pass it to `fit` as it is."
        )
    if isinstance(data, Iterator) or callable(data):
        raise ValueError(
            f"tfdist.shard cannot split a generator: it can be read only once, in one process. Received: "
            f"{type(data).__name__}. Either make it a dataset, "
            "`tfdist.shard(tf.data.Dataset.from_generator(make_generator, output_signature=...))`, or write "
            "a `keras.utils.PyDataset`, or let each rank's generator yield its own part and pass it to `fit` "
            "with `steps_per_epoch`."
        )
