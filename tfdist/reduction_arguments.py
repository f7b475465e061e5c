"""The arguments that `DistributedOptimizer` and `DistributedGradientTape` share, checked once for both."""

from __future__ import annotations

from typing import Any

from tfdist import world
from tfdist.collectives.base import Group, ReduceOp
from tfdist.compression import Compression
from tfdist.gradients import DEFAULT_BUCKET_BYTES, GradientReducer


def make_reducer(
    name: str,
    *,
    op: ReduceOp,
    compression: Any,
    sparse_as_dense: bool,
    gradient_predivide_factor: float,
    num_groups: int,
    groups: Any,
    process_set: Any,
    device_dense: str,
    device_sparse: str,
    scale_local_gradients: bool,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
) -> GradientReducer:
    """A reducer as the user's arguments ask; they are explained at `tfdist.DistributedOptimizer`.

    Raises:
        ValueError: an argument has no meaning here; the message says which and why.
    """
    if op not in (ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.ADASUM):
        raise ValueError(
            f"Gradients combine by op=tfdist.Average, tfdist.Sum or tfdist.Adasum; received {op!r}."
        )
    if op is ReduceOp.ADASUM and world.backend() != "horovod":
        raise ValueError(
            f"op=tfdist.Adasum runs on the Horovod engine only, and this world uses {world.backend()!r}. Use "
            "tfdist.Average, or build Horovod with `tfdist build-horovod`."
        )
    if gradient_predivide_factor != 1.0 and op is not ReduceOp.AVERAGE:
        raise ValueError(
            f"gradient_predivide_factor={gradient_predivide_factor} splits an average; it needs "
            f"op=tfdist.Average, received op={op}."
        )
    if gradient_predivide_factor <= 0:
        raise ValueError(f"gradient_predivide_factor must be > 0; received {gradient_predivide_factor}.")
    if not all(hasattr(compression, method) for method in ("compress", "decompress")):
        raise ValueError(
            "compression must be tfdist.Compression.none, .fp16 or .bf16, or have compress and decompress; "
            f"received {compression!r}."
        )
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be >= 1; received {bucket_bytes}.")
    return GradientReducer(
        name,
        op=op,
        compression=None if compression is Compression.none else compression,
        sparse_as_dense=sparse_as_dense,
        predivide_factor=gradient_predivide_factor,
        groups=_groups(num_groups if groups is None else groups),
        group=_group(process_set),
        device_dense=device_dense,
        device_sparse=device_sparse,
        scale_local=scale_local_gradients,
        bucket_bytes=bucket_bytes,
    )


def _group(process_set: Any) -> Group | None:
    if process_set is None:
        return None
    group: Group = process_set.group()
    return group


def _groups(groups: Any) -> Any:
    if groups is None or groups == 0:
        return None
    if isinstance(groups, int) and not isinstance(groups, bool) and groups > 0:
        return groups
    if isinstance(groups, list | tuple) and all(isinstance(members, list | tuple) for members in groups):
        return groups
    raise ValueError(
        f"groups must be None, an integer >= 0, or a list of lists of variables; got {groups!r}."
    )
