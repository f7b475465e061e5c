"""`DistributedGradientTape`: gradients of all ranks, for custom loops with a plain optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
import wrapt

from tfdist import world
from tfdist.collectives.base import ReduceOp
from tfdist.compression import Compression
from tfdist.errors import TfdistError
from tfdist.reduction_arguments import make_reducer


class DistributedGradientTape(wrapt.ObjectProxy):  # type: ignore[type-arg]
    """Wraps a `tf.GradientTape` so that `gradient` returns the gradients of all ranks.

    Every rank calls `gradient` with the same sources; 2(N-1)/N·K bytes per rank. Arguments are those of
    `DistributedOptimizer`. Use it with a plain optimizer: with a `DistributedOptimizer` as well, gradients
    would be combined twice.

    Args:
        gradtape: the tape, recording or finished.
        device_dense: device for dense collectives.
        device_sparse: device for sparse collectives.
        compression: `tfdist.Compression.none`, `.fp16` or `.bf16`.
        sparse_as_dense: reduce embeddings' gradients as whole tables.
        op: `tfdist.Average`, `tfdist.Sum` or `tfdist.Adasum`.
        gradient_predivide_factor: see `DistributedOptimizer`.
        num_groups: older name of an integer `groups`.
        groups: see `DistributedOptimizer`.
        process_set: `tfdist.ProcessSet` to reduce over; None for the whole world.
        scale_local_gradients: see `DistributedOptimizer`.

    Example:
        >>> import tensorflow as tf, tfdist
        >>> tfdist.init()
        >>> weight = tf.Variable(2.0)
        >>> with tf.GradientTape() as tape:
        ...     loss = weight * weight
        >>> tape = tfdist.DistributedGradientTape(tape)
        >>> float(tape.gradient(loss, weight))
        4.0
    """

    def __init__(
        self,
        gradtape: tf.GradientTape,
        device_dense: str = "",
        device_sparse: str = "",
        compression: Any = Compression.none,
        sparse_as_dense: bool = False,
        op: ReduceOp = ReduceOp.AVERAGE,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        groups: int | Sequence[Sequence[Any]] | None = None,
        process_set: Any = None,
        scale_local_gradients: bool = True,
    ) -> None:
        here = world.current()
        if here.is_placed:
            raise TfdistError(
                f"Strategy {here.strategy} combines gradients in the optimizer: take them from a plain "
                "tf.GradientTape and apply them with a tfdist.DistributedOptimizer. DistributedGradientTape is for "
                'strategy="ring".'
            )
        if isinstance(gradtape, DistributedGradientTape):
            raise TypeError("The tape is a DistributedGradientTape already; wrap a tape once.")
        if not isinstance(gradtape, tf.GradientTape):
            raise TypeError(f"DistributedGradientTape wraps a tf.GradientTape; received {gradtape!r}.")
        super().__init__(gradtape)
        self._self_reducer = make_reducer(
            "DistributedGradientTape",
            op=op,
            compression=compression,
            sparse_as_dense=sparse_as_dense,
            gradient_predivide_factor=gradient_predivide_factor,
            num_groups=num_groups,
            groups=groups,
            process_set=process_set,
            device_dense=device_dense,
            device_sparse=device_sparse,
            scale_local_gradients=scale_local_gradients,
        )

    def __enter__(self) -> DistributedGradientTape:
        self.__wrapped__.__enter__()
        return self

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: tf.UnconnectedGradients = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """`tf.GradientTape.gradient`, combined over the ranks; every rank calls it.

        Returns:
            Gradients in the structure of `sources`.
        """
        sources = keras.tree.map_structure(_tf_variable, sources)
        gradients = self.__wrapped__.gradient(target, sources, output_gradients, unconnected_gradients)
        flat_sources = tf.nest.flatten(sources)
        flat = tf.nest.flatten(gradients, expand_composites=False)
        return tf.nest.pack_sequence_as(sources, self._self_reducer.reduce(flat, flat_sources))

    def register_local_source(self, source: Any) -> None:
        """Leaves a source's gradient to its rank: it is not combined with the other ranks'."""
        self._self_reducer.local_variables.add(id(_tf_variable(source)))


def _tf_variable(variable: Any) -> Any:
    return variable.value if isinstance(variable, keras.Variable) else variable
