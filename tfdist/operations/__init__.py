"""Collectives for user code: checked, agreed between ranks, differentiable, the same on every engine."""

from tfdist.operations.agreement import translate
from tfdist.operations.movement import (
    allgather,
    alltoall,
    barrier,
    broadcast,
    grouped_allgather,
    grouped_broadcast,
)
from tfdist.operations.objects import allgather_object, broadcast_object
from tfdist.operations.reductions import (
    Adasum,
    Average,
    LogicalAnd,
    LogicalOr,
    Max,
    Min,
    Product,
    Sum,
    allreduce,
    grouped_allreduce,
    grouped_reducescatter,
    reduce,
    reducescatter,
)

__all__ = [
    "Adasum",
    "Average",
    "LogicalAnd",
    "LogicalOr",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_object",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_broadcast",
    "grouped_reducescatter",
    "reduce",
    "reducescatter",
    "translate",
]
