"""Which rows a rank reads in which step; pure arithmetic on row numbers.

Problem: N ranks with local batch b must together see, in step k, exactly the rows that one process with
batch N*b sees in its step k, and all ranks must take the same number of steps (a collective waits for every
rank).

Solution: put all rows in one common order, cut it into global batches of N*b, and give rank r the r-th block
of b rows of each:

    order     | 7 2 9 4 | 0 5 1 8 | 3 6 |        10 rows, 2 ranks, local batch 2
    rank 0    | 7 2     | 0 5     | 3   |
    rank 1    |     9 4 |     1 8 |   6 |

Only the last, partial global batch of m rows needs a rule. "drop" gives every rank floor(m / N) rows, so that
the plain average of the ranks' gradients is the gradient of the batch; fewer than N rows are left out.
"keep" leaves out none: the first m mod N ranks get one row more, and if m < N (some rank would have nothing)
the m rows join the step before.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np
import numpy.typing as npt

Remainder = Literal["drop", "keep"]
REMAINDERS: tuple[Remainder, ...] = ("drop", "keep")


@dataclasses.dataclass(frozen=True)
class RowPlan:
    """How rows are dealt out to ranks.

    Attributes:
        rows: number of rows of the whole data.
        ranks: how many ranks share them.
        batch_size: rows per rank and full step.
        remainder: what happens to the rows that do not divide, see the module's docstring.
    """

    rows: int
    ranks: int
    batch_size: int
    remainder: Remainder

    def __post_init__(self) -> None:
        if self.rows < self.ranks:
            raise ValueError(
                f"tfdist.shard needs at least one row per rank. Received: {self.rows} rows for {self.ranks} "
                "ranks. Use fewer ranks or more data."
            )

    @property
    def full_steps(self) -> int:
        """Steps in which every rank reads `batch_size` rows."""
        return self.rows // (self.ranks * self.batch_size)

    @property
    def tail(self) -> int:
        """Rows of the last, partial global batch."""
        return self.rows % (self.ranks * self.batch_size)

    @property
    def steps(self) -> int:
        """Number of batches in one pass, equal on all ranks."""
        return self.full_steps + (1 if self.tail >= self.ranks else 0)

    @property
    def dropped(self) -> int:
        """Rows that one pass leaves out; fewer than `ranks`."""
        return self.tail % self.ranks if self.remainder == "drop" else 0

    def positions(self, rank: int) -> npt.NDArray[np.int64]:
        """Places in the common order that `rank` reads, step after step; int64 `[rows of this rank]`."""
        block = self.ranks * self.batch_size
        full = np.arange(self.full_steps, dtype=np.int64)[:, None] * block
        mine = full + rank * self.batch_size + np.arange(self.batch_size, dtype=np.int64)
        start, stop = self._tail_span(rank)
        return np.concatenate(
            [mine.ravel(), self.full_steps * block + np.arange(start, stop, dtype=np.int64)]
        )

    def bounds(self, rank: int) -> npt.NDArray[np.int64]:
        """Where each step begins and ends within `positions(rank)`; int64 `[steps + 1]`."""
        bounds = np.arange(self.full_steps + 1, dtype=np.int64) * self.batch_size
        start, stop = self._tail_span(rank)
        if self.tail >= self.ranks:
            return np.append(bounds, bounds[-1] + stop - start)
        bounds[-1] += stop - start  # too few rows for a step of their own join the last full one
        return bounds

    def joined(self, first: int, count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """`positions` and `bounds` of one reader in place of `count` ranks from `first` on: their process."""
        if count == 1:
            return self.positions(first), self.bounds(first)
        joined = range(first, first + count)
        each = [np.split(self.positions(rank), self.bounds(rank)[1:-1]) for rank in joined]
        steps = [np.concatenate(parts) for parts in zip(*each, strict=True)]
        bounds = np.cumsum([0, *(len(step) for step in steps)])
        return np.concatenate(steps), bounds.astype(np.int64, copy=False)

    def _tail_span(self, rank: int) -> tuple[int, int]:
        """`[start, stop)` of the rank's rows within the last, partial global batch."""
        each, extra = divmod(self.tail, self.ranks)
        if self.remainder == "drop":
            return rank * each, (rank + 1) * each
        return rank * each + min(rank, extra), (rank + 1) * each + min(rank + 1, extra)


def pass_order(rows: int, *, seed: int | None, number: int) -> npt.NDArray[np.int64]:
    """Common order of all rows in pass `number` over the data; the same on every rank and machine.

    It depends on nothing but the arguments: not on `tf.random.set_seed`, which scripts often set to another
    value on each rank.

    Args:
        rows: how many rows there are.
        seed: None keeps the order of the data.
        number: 0 for the first pass, 1 for the second, and so on.

    Returns:
        int64 `[rows]`, a permutation of `range(rows)`.
    """
    if seed is None:
        return np.arange(rows, dtype=np.int64)
    return np.random.default_rng((seed, number)).permutation(rows).astype(np.int64, copy=False)
