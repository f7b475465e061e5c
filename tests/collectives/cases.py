"""Cases for collectives: what each rank passes in, and what numpy says must come out.

A case is plain data, so that hypothesis draws it in the test process, ranks rebuild their tensors from it, and
the oracle here rebuilds all of them.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from typing import Any

import numpy as np
from hypothesis import strategies as st

FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("int32", "int64", "uint8")
DTYPES = (*FLOATS, *INTEGERS, "bool")
MODES = ("eager", "graph", "unknown shape")
# Operations with the dtypes that they make sense for.
REDUCTIONS = {
    "Sum": (*FLOATS, *INTEGERS),
    "Average": FLOATS,
    "Min": (*FLOATS, *INTEGERS),
    "Max": (*FLOATS, *INTEGERS),
    "Product": (*FLOATS, *INTEGERS),
    "LogicalAnd": ("bool", *INTEGERS),
    "LogicalOr": ("bool", *INTEGERS),
}
_ROUNDING = {"float16": 2**-10, "bfloat16": 2**-7, "float32": 2**-23, "float64": 2**-52}


@dataclasses.dataclass(frozen=True)
class Case:
    """One collective.

    Attributes:
        kind: name of the function in `tfdist.operations`.
        dtype: of the tensor.
        shape: equal on all ranks; for allgather and alltoall without the first axis.
        op: name of the reduction; empty for others.
        mode: one of `MODES`.
        root: root rank, taken modulo the world's size.
        rows: length of the first axis by rank, cyclic (allgather), or rows to each rank, cyclic (alltoall).
        seed: of the values.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...] = ()
    op: str = ""
    mode: str = "eager"
    root: int = 0
    rows: tuple[int, ...] = ()
    seed: int = 0

    def splits(self, rank: int, size: int) -> list[int]:
        """How many rows a rank sends to each other one."""
        return [self.rows[(rank + other) % len(self.rows)] for other in range(size)]

    def tensor(self, rank: int, size: int) -> np.ndarray:
        """What a rank passes in."""
        shape = self.shape
        if self.kind == "allgather":
            shape = (self.rows[rank % len(self.rows)], *shape)
        elif self.kind == "alltoall":
            shape = (sum(self.splits(rank, size)), *shape)
        entropy = zlib.crc32(repr((self.seed, rank, self.kind)).encode())
        generator = np.random.default_rng(entropy)
        if self.dtype == "bool":
            return generator.integers(0, 2, shape).astype(bool)
        if self.dtype in INTEGERS:
            low = 0 if self.dtype == "uint8" else -9
            return generator.integers(low, 10, shape).astype(self.dtype)
        return generator.standard_normal(shape).astype(numpy_dtype(self.dtype))

    def expected(self, rank: int, size: int) -> np.ndarray:
        """What a rank must get."""
        tensors = [self.tensor(other, size) for other in range(size)]
        if self.kind == "allgather":
            return np.concatenate(tensors)
        if self.kind == "broadcast":
            return tensors[self.root % size]
        if self.kind == "alltoall":
            parts = []
            for other, tensor in enumerate(tensors):
                ends = np.cumsum([0, *self.splits(other, size)])
                parts.append(tensor[ends[rank] : ends[rank + 1]])
            return np.concatenate(parts)
        combined = combine(self.op, tensors)
        if self.kind == "reduce":
            return combined if rank == self.root % size else np.zeros_like(combined)
        if self.kind == "reducescatter":
            return np.array_split(combined, size)[rank]
        return combined

    def tolerance(self, size: int) -> np.ndarray:
        """Largest allowed difference by element: rounding of the dtype, for as many operations as ranks."""
        tensors = [np.abs(self.tensor(rank, size).astype(np.float64)) for rank in range(size)]
        largest = functools.reduce(np.multiply, tensors) if self.op == "Product" else sum(tensors)
        return 2 * size * _ROUNDING.get(self.dtype, 0.0) * np.max(largest, initial=0.0)

    def check(self, results: list[np.ndarray]) -> None:
        """Asserts what all ranks got."""
        size = len(results)
        for rank, result in enumerate(results):
            expected = self.expected(rank, size)
            assert result.dtype == expected.dtype, f"{self} rank {rank}: {result.dtype}"
            assert result.shape == expected.shape, f"{self} rank {rank}: {result.shape}, not {expected.shape}"
            if self.kind in ("allgather", "broadcast", "alltoall") or self.dtype not in FLOATS:
                assert np.array_equal(result, expected), f"{self} rank {rank}: {result}, not {expected}"
            else:
                difference = np.abs(result.astype(np.float64) - expected.astype(np.float64))
                assert np.all(difference <= self.tolerance(size)), (
                    f"{self} rank {rank}: {result}, not {expected}"
                )
        if self.kind == "allreduce":
            assert len({result.tobytes() for result in results}) == 1, f"{self}: ranks differ"


def numpy_dtype(name: str) -> Any:
    """Numpy's dtype; bfloat16 comes from TensorFlow's extension."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def combine(op: str, tensors: list[np.ndarray]) -> np.ndarray:
    """The reduction in numpy: floats in float64, integers wrapping around in their own dtype."""
    dtype = tensors[0].dtype
    if op in ("LogicalAnd", "LogicalOr"):
        logical = np.logical_and if op == "LogicalAnd" else np.logical_or
        return functools.reduce(logical, [tensor != 0 for tensor in tensors]).astype(dtype)
    wide = dtype if dtype.kind in "iu" else np.dtype(np.float64)
    values = [tensor.astype(wide) for tensor in tensors]
    functions = {
        "Sum": np.add,
        "Average": np.add,
        "Min": np.minimum,
        "Max": np.maximum,
        "Product": np.multiply,
    }
    result = functools.reduce(functions[op], values)
    if op == "Average":
        result = result / len(tensors)
    return result.astype(dtype)


_sizes = st.integers(0, 5) | st.sampled_from([17, 1000])
_shapes = st.lists(_sizes, min_size=0, max_size=3).map(tuple).filter(lambda shape: np.prod(shape) < 1e5)
_common = {"mode": st.sampled_from(MODES), "seed": st.integers(0, 10**6)}


@st.composite
def reductions(draw: st.DrawFn) -> Case:
    """Allreduce, reduce and reducescatter of every operation and dtype."""
    kind = draw(st.sampled_from(["allreduce", "allreduce", "reduce", "reducescatter"]))
    op = draw(st.sampled_from(sorted(REDUCTIONS)))
    shapes = _shapes.filter(bool) if kind == "reducescatter" else _shapes
    return Case(
        kind,
        dtype=draw(st.sampled_from(REDUCTIONS[op])),
        shape=draw(shapes),
        op=op,
        root=draw(st.integers(0, 3)),
        **{name: draw(strategy) for name, strategy in _common.items()},
    )


@st.composite
def movements(draw: st.DrawFn) -> Case:
    """Allgather, broadcast and alltoall of every dtype."""
    return Case(
        draw(st.sampled_from(["allgather", "broadcast", "alltoall"])),
        dtype=draw(st.sampled_from(DTYPES)),
        shape=draw(_shapes),
        root=draw(st.integers(0, 3)),
        rows=tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))),
        **{name: draw(strategy) for name, strategy in _common.items()},
    )
