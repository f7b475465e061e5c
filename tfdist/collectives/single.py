"""The engine of a world with one rank: every collective is the identity.

With it "alone" is a backend and not an `if` in every caller; checks and gradients above it run as in a large
world, so a script that works alone has passed them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tfdist.collectives.base import Engine, Group, ReduceOp

if TYPE_CHECKING:
    import tensorflow as tf


class SingleEngine(Engine):
    """Returns what it is given."""

    name = "single"
    native_ops = frozenset(ReduceOp) - {ReduceOp.ADASUM}
    native_dtypes = frozenset(
        {
            "float16", "bfloat16", "float32", "float64", "complex64", "complex128", "bool", "int8", "int16",
            "int32", "int64", "uint8", "uint16", "uint32", "uint64",
        }
    )  # fmt: skip

    def start(self) -> None:
        """Nothing to start."""

    def stop(self) -> None:
        """Nothing to stop."""

    def abort(self, error: Exception) -> None:
        """Nothing is ever pending."""

    def allreduce(
        self, tensors: Sequence[tf.Tensor], op: ReduceOp, *, name: str, group: Group, mean: bool = False
    ) -> list[tf.Tensor]:
        """The tensors themselves."""
        return list(tensors)

    def allgather(
        self, tensor: tf.Tensor, *, name: str, group: Group, lengths: Sequence[int] | None = None
    ) -> tf.Tensor:
        """The tensor itself."""
        return tensor

    def broadcast(
        self, tensors: Sequence[tf.Tensor], root: int, *, name: str, group: Group
    ) -> list[tf.Tensor]:
        """The tensors themselves."""
        return list(tensors)

    def alltoall(
        self, tensor: tf.Tensor, splits: tf.Tensor, *, name: str, group: Group
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """The tensor and the splits themselves."""
        return tensor, splits

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
        """Nothing: there is nobody else."""
        return [None]

    def reducescatter(self, tensor: tf.Tensor, op: ReduceOp, *, name: str, group: Group) -> tf.Tensor:
        """The tensor itself."""
        return tensor
