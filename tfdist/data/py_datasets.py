"""Shards a keras.utils.PyDataset: rank r takes batches r, r+N, r+2N, ... in complete rounds of N."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np


class ShardedPyDataset(keras.utils.PyDataset):  # type: ignore[misc]  # Keras is untyped
    """One rank's batches of another PyDataset.

    Workers, multiprocessing and queue size are the inner dataset's. `on_epoch_begin` and `on_epoch_end` are
    forwarded, with `random` and `numpy.random` seeded alike on every rank while they run, so that an inner
    dataset that shuffles there keeps one common order.

    Args:
        inner: the whole data, the same on every rank.
        rank: number of this rank.
        ranks: how many ranks share the batches.
        seed: common seed of the inner dataset's own shuffling.
        keep: give the batches that do not divide to the first ranks instead of dropping them.
    """

    def __init__(self, inner: Any, *, rank: int, ranks: int, seed: int, keep: bool) -> None:
        super().__init__(
            workers=inner.workers,
            use_multiprocessing=inner.use_multiprocessing,
            max_queue_size=inner.max_queue_size,
        )
        self.inner = inner
        self._rank = rank
        self.ranks = ranks
        self._seed = seed
        self._keep = keep
        self._epoch = 0

    @property
    def num_batches(self) -> int | None:
        """Batches of this rank; None if the inner dataset has no end."""
        whole = batches_of(self.inner)
        if whole is None:
            return None
        extra = 1 if self._keep and self._rank < whole % self.ranks else 0
        return whole // self.ranks + extra

    def __len__(self) -> int:
        count = self.num_batches
        if count is None:
            raise TypeError("This PyDataset has no end, so it has no length.")
        return count

    def __getitem__(self, index: int) -> Any:
        return self.inner[index * self.ranks + self._rank]

    def on_epoch_begin(self) -> None:
        # Keras before 3.5 has no such hook.
        with self._common_randomness():
            getattr(self.inner, "on_epoch_begin", lambda: None)()

    def on_epoch_end(self) -> None:
        with self._common_randomness():
            self.inner.on_epoch_end()
        self._epoch += 1

    @contextlib.contextmanager
    def _common_randomness(self) -> Iterator[None]:
        python_state, numpy_state = random.getstate(), np.random.get_state()
        common = (self._seed + self._epoch) % 2**32
        random.seed(common)
        np.random.seed(common)
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


def batches_of(dataset: Any) -> int | None:
    """Number of batches of a PyDataset; None if it has no end."""
    count = dataset.num_batches
    return None if count is None else int(count)


def py_dataset_facts(dataset: Any) -> dict[str, Any]:
    """What must be equal on all ranks for their shards to be disjoint."""
    return {"kind of data": type(dataset).__name__, "number of batches": batches_of(dataset)}


def shard_py_dataset(dataset: Any, *, rank: int, ranks: int, seed: int, keep: bool) -> ShardedPyDataset:
    """This rank's batches; see `tfdist.shard` for the rules."""
    count = batches_of(dataset)
    if count is not None and count < ranks:
        raise ValueError(
            f"tfdist.shard needs at least one batch per rank. Received: a PyDataset of {count} batches for "
            f"{ranks} ranks. Use a smaller batch size or fewer ranks."
        )
    return ShardedPyDataset(dataset, rank=rank, ranks=ranks, seed=seed, keep=keep)
