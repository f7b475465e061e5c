"""The contract of a collective engine.

An engine only moves and combines tensors. What is common to all engines lives above it, in
`tfdist.operations`: argument checks, agreement between ranks before an eager collective, casts for dtypes an
engine lacks, averages, gradients, sparse tensors, objects, error messages. So an engine stays small, and a
new one needs nothing but these methods and the contract suite in tests/collectives/contract.py.

Every method works eagerly and inside `tf.function`, returns tensors that truly depend on the communication
(a collective without a consumer is pruned from one rank's graph while its peers wait for ever), and must be
called by every rank of `group` with the same `name`. Names identify collectives across ranks: a rank that
retraces, or traces in another order, still meets its peers.
"""

from __future__ import annotations

import abc
import dataclasses
import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import tensorflow as tf


class ReduceOp(enum.Enum):
    """How values of several ranks become one; the members are `tfdist.Sum`, `tfdist.Average`, and so on."""

    SUM = "Sum"
    AVERAGE = "Average"
    MIN = "Min"
    MAX = "Max"
    PRODUCT = "Product"
    LOGICAL_AND = "LogicalAnd"
    LOGICAL_OR = "LogicalOr"
    ADASUM = "Adasum"


@dataclasses.dataclass(frozen=True)
class Group:
    """The ranks that take part in a collective.

    Attributes:
        ranks: world ranks, ascending, without repetition.
        index: number of the process set in order of creation, equal on all ranks; 0 is the whole world.
    """

    ranks: tuple[int, ...]
    index: int = 0

    @property
    def size(self) -> int:
        return len(self.ranks)

    def position(self, rank: int) -> int:
        """Place of world rank `rank` in the group, 0-based."""
        return self.ranks.index(rank)


class Engine(abc.ABC):
    """Moves tensors between the ranks of a world.

    Attributes:
        name: what the user writes in `init(backend=...)`.
        native_ops: reductions that `allreduce` accepts; `tfdist.operations` expresses the others with these.
        native_dtypes: names of dtypes that every method accepts; others are cast before and after.
    """

    name: ClassVar[str]
    native_ops: ClassVar[frozenset[ReduceOp]]
    native_dtypes: ClassVar[frozenset[str]]

    @abc.abstractmethod
    def start(self) -> None:
        """Makes the engine ready; all ranks call it, before or in their first collective. Idempotent."""

    @abc.abstractmethod
    def stop(self) -> None:
        """Orderly end; all ranks call it. Idempotent."""

    @abc.abstractmethod
    def abort(self, error: Exception) -> None:
        """Makes every pending and later collective of this rank fail because of `error`, which later ones raise.

        Called from the control thread when a peer is lost; must not block.
        """

    @abc.abstractmethod
    def allreduce(
        self, tensors: Sequence[tf.Tensor], op: ReduceOp, *, name: str, group: Group, mean: bool = False
    ) -> list[tf.Tensor]:
        """Combines tensors element-wise over the ranks; every rank receives bit-identical results.

        Args:
            tensors: dense tensors, shapes equal on all ranks; dtypes may be mixed. Shapes that are known
                while tracing are cheaper.
            op: one of `native_ops`.
            name: identifies the collective on all ranks.
            group: the ranks that take part.
            mean: whether sums of floats are divided by the number of ranks, at less cost than afterwards.

        Returns:
            One tensor per input, same shapes and dtypes.
        """

    @abc.abstractmethod
    def allgather(
        self, tensor: tf.Tensor, *, name: str, group: Group, lengths: Sequence[int] | None = None
    ) -> tf.Tensor:
        """Concatenates the ranks' tensors along axis 0, whose length may differ between ranks (0 included).

        Args:
            tensor: at least one axis.
            name: identifies the collective on all ranks.
            group: the ranks that take part.
            lengths: length of axis 0 on every rank of the group where it is already known (an eager call has
                agreed on it); spares the engine an exchange.
        """

    @abc.abstractmethod
    def broadcast(
        self, tensors: Sequence[tf.Tensor], root: int, *, name: str, group: Group
    ) -> list[tf.Tensor]:
        """Gives every rank the tensors of world rank `root`; shapes and dtypes equal on all ranks."""

    @abc.abstractmethod
    def alltoall(
        self, tensor: tf.Tensor, splits: tf.Tensor, *, name: str, group: Group
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Sends `splits[i]` rows to the i-th rank of the group.

        Args:
            tensor: rows along axis 0.
            splits: int32 `[group.size]`, its sum is the number of rows.
            name: identifies the collective on all ranks.
            group: the ranks that take part.

        Returns:
            The received rows in group order, and how many came from each rank (int32 `[group.size]`).
        """

    @abc.abstractmethod
    def reducescatter(self, tensor: tf.Tensor, op: ReduceOp, *, name: str, group: Group) -> tf.Tensor:
        """Combines tensors over the ranks and leaves each rank its rows.

        Args:
            tensor: at least one axis, shape equal on all ranks.
            op: one of `native_ops`.
            name: identifies the collective on all ranks.
            group: the ranks that take part.

        Returns:
            The rows `split_rows` gives to this rank.
        """

    @abc.abstractmethod
    def exchange(
        self,
        outgoing: Sequence[tf.Tensor | None],
        incoming: Sequence[int],
        *,
        name: str,
        group: Group,
        dtype: tf.DType,
        after: Sequence[tf.Tensor] = (),
    ) -> list[tf.Tensor | None]:
        """Sends each rank a tensor of its own, point to point, where both sides know who sends what.

        Each rank sends just the bytes of `outgoing`, and nothing is negotiated.

        Args:
            outgoing: for each rank of the group, in order, a flat tensor of static size, or None for nothing;
                None for this rank itself.
            incoming: how many values each rank of the group sends to this one.
            name: identifies the collective on all ranks.
            group: the ranks that take part.
            dtype: of all tensors, one of `native_dtypes`.
            after: what must be computed before anything is received. A graph begins with what depends on nothing:
                a step that ends for want of data would leave behind that it waits for a message.

        Returns:
            What each rank of the group has sent: flat, or None for nothing.
        """

    def register(self, group: Group) -> None:  # noqa: B027 - most engines need nothing
        """Tells the engine about a new group; every rank of the world calls it, in the same order."""

    def forget(self, group: Group) -> None:  # noqa: B027 - most engines need nothing
        """Ends a group; every rank of the world calls it, in the same order."""


def split_rows(rows: int, parts: int) -> list[int]:
    """How many of `rows` each rank gets: equal shares, the first ranks one more where it doesn't divide.

    Example:
        >>> split_rows(7, 3)
        [3, 2, 2]
    """
    return [rows // parts + (part < rows % parts) for part in range(parts)]
