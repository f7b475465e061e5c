"""The contract suite: what every engine must do, run in every world by `test_contract.py`.

A new engine gets its worlds into `tests.worlds.ALL` and passes these.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.collectives import bodies
from tests.collectives.cases import DTYPES, MODES, REDUCTIONS, Case, movements, reductions
from tests.worlds import World

# Worlds are shared on purpose, and an example is a list of cases, so few examples are many collectives.
several = settings(
    max_examples=4,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    database=None,
    phases=(Phase.explicit, Phase.generate),  # shrinking would repeat a hang many times
)


def check(world: World, cases: list[Case], body: Any = bodies.run_cases) -> None:
    by_rank = world.call(body, cases)
    for number, case in enumerate(cases):
        case.check([results[number] for results in by_rank])


class Contract:
    """Every test takes the fixture `world`."""

    def test_engine_primitives(self, world: World) -> None:
        size = world.size
        total = size * (size - 1) / 2
        for rank, results in enumerate(world.call(bodies.engine_primitives)):
            summed = results["allreduce"]
            assert np.array_equal(summed[0], np.full([3], total, np.float32))
            assert summed[1] == total
            assert summed[2].shape == (0, 2)
            assert np.array_equal(summed[3], np.full([2, 2], total + size / 2, np.float32))
            rows = np.concatenate([np.full([other + 1, 2], other) for other in range(size)])
            assert np.array_equal(results["allgather"], rows)
            assert np.array_equal(results["allgather known"], rows)
            assert results["broadcast"][0].tolist() == [size - 1] * 2
            assert results["broadcast"][1]
            received, counts = results["alltoall"]
            assert received.tolist() == [other for other in range(size) for _ in range(2)]
            assert counts.tolist() == [2] * size
            expected = np.array_split(np.arange(size + 1, dtype=np.float32), size)[rank]
            assert np.array_equal(results["reducescatter"], expected)
            sent = [[10 * other + rank] * bodies.exchange_size(other, rank) for other in range(size)]
            for mode in ("exchange", "exchange in a graph"):
                assert [part.tolist() for part in results[mode]] == sent * 3

    @pytest.mark.parametrize("mode", MODES)
    def test_every_operation_and_dtype(self, world: World, mode: str) -> None:
        cases = [
            Case("allreduce", dtype, (3, 2), op=op, mode=mode, seed=number)
            for number, (op, dtypes) in enumerate(REDUCTIONS.items())
            for dtype in dtypes
        ]
        cases += [
            Case(kind, dtype, (2,), mode=mode, root=1, rows=(1, 0, 3))
            for kind in ("allgather", "broadcast", "alltoall")
            for dtype in DTYPES
        ]
        check(world, cases)

    @several
    @given(cases=st.lists(reductions(), min_size=10, max_size=20))
    def test_reductions(self, world: World, cases: list[Case]) -> None:
        check(world, cases)

    @several
    @given(cases=st.lists(movements(), min_size=10, max_size=20))
    def test_movements(self, world: World, cases: list[Case]) -> None:
        check(world, cases)

    @several
    @given(cases=st.lists(reductions() | movements(), min_size=10, max_size=20))
    def test_many_in_flight(self, world: World, cases: list[Case]) -> None:
        check(world, cases, bodies.run_together)

    def test_bits_survive(self, world: World) -> None:
        for survived in world.call(bodies.bits_survive):
            assert all(survived.values()), survived

    def test_grouped_mixture(self, world: World) -> None:
        size = world.size
        total = size * (size + 1) / 2
        for results in world.call(bodies.grouped_mixture):
            filled = [values for values in results[:-2] if values.size]
            assert len(filled) == 9
            assert all(values.tolist() == [total] for values in filled)
            assert results[-2].tolist() == [size * (size - 1) / 2]
            assert results[-1].tolist() == [total]

    @pytest.mark.parametrize("mode", ["eager", "graph"])
    @pytest.mark.parametrize(
        ("kind", "op"),
        [("allreduce", op) for op in ("Sum", "Average", "Max", "Min")]
        + [(kind, op) for kind in ("reduce", "reducescatter") for op in ("Sum", "Average")]
        + [("allgather", ""), ("broadcast", ""), ("alltoall", "")],
    )
    def test_gradient_is_that_of_the_summed_losses(self, world: World, kind: str, op: str, mode: str) -> None:
        ranks = world.call(bodies.gradients, kind, op, mode)
        inputs, weights, gradients = zip(*ranks, strict=True)
        for rank in range(world.size):
            expected = numeric_gradient(kind, op, list(inputs), list(weights), rank)
            assert np.allclose(gradients[rank], expected, rtol=1e-3, atol=2e-2), (
                rank,
                gradients[rank],
                expected,
            )

    def test_second_gradient(self, world: World) -> None:
        results = world.call(bodies.second_gradient)
        # Every rank's loss is the mean of x³ over ranks; the losses are summed, then differentiated by x twice.
        assert results == pytest.approx([6.0 * (2.0 + rank) for rank in range(world.size)])

    @pytest.mark.parametrize("mode", ["eager", "graph"])
    @pytest.mark.parametrize("op", ["Sum", "Average"])
    def test_indexed_slices(self, world: World, op: str, mode: str) -> None:
        size = world.size
        dense = np.zeros([size + 1, 3], np.float32)
        for rank in range(size):
            dense[: rank + 1] += rank + 1.0
        for result in world.call(bodies.indexed_slices, mode, op):
            assert np.allclose(result, dense / (size if op == "Average" else 1))

    @pytest.mark.parametrize("kind", ["none", "fp16", "bf16"])
    def test_compression(self, world: World, kind: str) -> None:
        total = world.size * (world.size + 1) / 2
        for dtype, result, whole in world.call(bodies.compressed, kind):
            assert dtype == "float32"
            assert result.tolist() == [total, 2 * total]
            assert whole == 100_000 * world.size

    def test_scale_factors(self, world: World) -> None:
        total = world.size * (world.size - 1) / 2
        assert [result.tolist() for result in world.call(bodies.scaled)] == [[total]] * world.size

    def test_objects(self, world: World) -> None:
        last = world.size - 1
        for shared, gathered in world.call(bodies.objects):
            assert shared == {"rank": last, "text": "x" * 3000}
            assert gathered == [["r"] * rank for rank in range(world.size)]

    def test_barrier(self, world: World) -> None:
        assert all(world.call(bodies.barriers))

    def test_retracing_in_any_order(self, world: World) -> None:
        orders = [[[2, 3, 5], [5, 3, 2], [3, 5, 2], [2, 5, 3]][rank % 4] for rank in range(world.size)]
        total = world.size * (world.size + 1) / 2
        results = world.call(bodies.retrace, each=[[order] for order in orders])
        assert results == [[[total] * length for length in (2, 3, 5)]] * world.size

    def test_constants_travel_each_time(self, world: World) -> None:
        """TensorFlow runs an operation on constants when it optimizes the graph, unless it is kept from it."""
        size = world.size
        expected = []
        for turn in (0.0, 1.0, 2.0):
            others = [turn] * (size - 1)
            total = 1.0 + sum(others)
            gathered = [value for value in [1.0, *others] for _ in range(size)]
            expected.append([[total] * size, gathered, [1.0] * size, [total], [1.0, *others]])
        assert world.call(bodies.constants_on_the_first_rank) == [expected] * size

    def test_tracing_in_any_order(self, world: World) -> None:
        orders = [["doubled", "negated"][:: 1 if rank % 2 else -1] for rank in range(world.size)]
        total = world.size * (world.size + 1) / 2
        results = world.call(bodies.trace_order, each=[[order] for order in orders])
        assert results == [{"doubled": 2 * total, "negated": -total}] * world.size

    def test_one_name_for_two_collectives(self, world: World) -> None:
        assert world.call(bodies.same_name_twice) == [[world.size, 10.0 * world.size]] * world.size

    def test_unused_results(self, world: World) -> None:
        size = world.size
        assert world.call(bodies.unused_on_some_ranks) == [size + 2.0, *[1.0] * (size - 1)]

    def test_control_flow(self, world: World) -> None:
        cubed = float(world.size**3)
        assert world.call(bodies.in_control_flow) == [[cubed + 1, -cubed - 1]] * world.size

    def test_names_are_stable(self, world: World) -> None:
        for names in world.call(bodies.derived_names):
            half = len(names) // 2
            assert names[:half] == names[half:]
            assert len(set(names[:half])) == half >= 5


def numeric_gradient(
    kind: str, op: str, inputs: list[np.ndarray], weights: list[np.ndarray], rank: int
) -> np.ndarray:
    """Central differences of the sum of all ranks' losses by one rank's input, in float64."""
    size = len(inputs)

    def outputs(values: list[np.ndarray]) -> list[np.ndarray]:
        root = size - 1
        if kind == "allgather":
            return [np.concatenate(values)] * size
        if kind == "broadcast":
            return [values[root]] * size
        if kind == "alltoall":
            blocks = [np.split(value, size) for value in values]
            return [np.concatenate([blocks[other][here] for other in range(size)]) for here in range(size)]
        functions = {"Sum": np.sum, "Average": np.mean, "Max": np.max, "Min": np.min}
        combined = functions[op](np.stack(values), axis=0)
        if kind == "reduce":
            return [combined if here == root else 0 * combined for here in range(size)]
        if kind == "reducescatter":
            return np.split(combined, size)
        return [combined] * size

    def loss(value: np.ndarray) -> float:
        values = [x.astype(np.float64) for x in inputs]
        values[rank] = value
        return sum(float(np.sum(w * y)) for w, y in zip(weights, outputs(values), strict=True))

    start, step = inputs[rank].astype(np.float64), 1e-5
    gradient = np.zeros_like(start)
    for place in np.ndindex(start.shape):
        moved = np.zeros_like(start)
        moved[place] = step
        gradient[place] = (loss(start + moved) - loss(start - moved)) / (2 * step)
    return gradient
