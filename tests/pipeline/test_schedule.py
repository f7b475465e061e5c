"""Schedules: equal to their drawings, and, for all sizes, complete, in order, and free of deadlock."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.pipeline.schedule import (
    SCHEDULES,
    Schedule,
    Unit,
    gpipe,
    interleaved,
    naive,
    needs,
    one_forward_one_backward,
)

sizes = st.integers(1, 8)
costs = st.floats(0.1, 10.0)


@pytest.mark.parametrize(
    ("make", "schedule"),
    [
        (naive, naive(3, 2)),
        (gpipe, gpipe(3, 4)),
        (one_forward_one_backward, one_forward_one_backward(3, 4)),
        (interleaved, interleaved(2, 4)),
    ],
)
def test_equals_its_drawing(make: Callable[..., Schedule], schedule: Schedule) -> None:
    text = inspect.getdoc(make)
    assert text is not None
    drawn = [line.split() for line in text.splitlines() if line.startswith("    ")]
    assert [row.split() for row in schedule.draw().splitlines()] == drawn


@given(st.sampled_from(sorted(SCHEDULES)), sizes, st.integers(1, 24), st.data())
def test_every_unit_once_after_what_it_needs(
    name: str, devices: int, micro_batches: int, data: st.DataObject
) -> None:
    if name == "interleaved":
        micro_batches = devices * -(-micro_batches // devices)
    schedule = SCHEDULES[name](devices, micro_batches)
    units = [unit for order in schedule.orders for unit in order]
    wanted = {
        Unit(stage, number, backward)
        for stage in range(schedule.stages)
        for number in range(micro_batches)
        for backward in (False, True)
    }
    assert len(units) == len(wanted)
    assert set(units) == wanted
    for device, order in enumerate(schedule.orders):
        assert {unit.stage % devices for unit in order} == {device}
    stages = schedule.stages
    forward, backward = (data.draw(st.lists(costs, min_size=stages, max_size=stages)) for _ in range(2))
    starts = schedule.start_times(forward, backward)  # raises if devices wait for each other
    for unit in units:
        for other in needs(unit, stages):
            end = starts[other] + (backward if other.backward else forward)[other.stage]
            assert starts[unit] >= end
    for order in schedule.orders:
        assert [starts[unit] for unit in order] == sorted(starts[unit] for unit in order)


@given(sizes, st.integers(1, 24), costs, costs)
def test_bubble_is_the_literatures(stages: int, micro_batches: int, forward: float, backward: float) -> None:
    def idle(schedule: Schedule) -> float:
        return schedule.bubble([forward] * schedule.stages, [backward] * schedule.stages)

    wanted = (stages - 1) / (micro_batches + stages - 1)
    assert idle(gpipe(stages, micro_batches)) == pytest.approx(wanted)
    assert idle(one_forward_one_backward(stages, micro_batches)) == pytest.approx(wanted)
    assert idle(naive(stages, micro_batches)) == pytest.approx((stages - 1) / stages)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4))
def test_interleaving_divides_the_bubble(devices: int, rounds: int, chunks: int) -> None:
    schedule = interleaved(devices, devices * rounds, chunks)
    ticks = [1.0] * schedule.stages
    wanted = (devices - 1) / (chunks * devices * rounds + devices - 1)
    assert schedule.bubble(ticks, [2.0] * schedule.stages) == pytest.approx(wanted)
    assert schedule.bubble(ticks, ticks) == pytest.approx(wanted)


@given(sizes, st.integers(1, 24))
def test_live_micro_batches(stages: int, micro_batches: int) -> None:
    alternating = one_forward_one_backward(stages, micro_batches)
    assert alternating.live(0) == min(stages, micro_batches)
    for stage in range(stages):
        assert alternating.live(stage) == min(stages - stage, micro_batches)
        assert gpipe(stages, micro_batches).live(stage) == micro_batches
        assert naive(stages, micro_batches).live(stage) == 1


def test_a_deadlock_is_seen() -> None:
    order = ((Unit(0, 0, True), Unit(0, 0, False)), (Unit(1, 0, False), Unit(1, 0, True)))
    with pytest.raises(ValueError, match=r"all wait: \[Unit\(stage=0, micro_batch=0, backward=True\)"):
        Schedule(2, 1, order).start_times([1.0, 1.0], [1.0, 1.0])


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize(("stages", "micro_batches"), [(0, 1), (1, 0)])
def test_nothing_to_do_is_refused(name: str, stages: int, micro_batches: int) -> None:
    with pytest.raises(ValueError, match=f"received stages={stages}, micro_batches={micro_batches}"):
        SCHEDULES[name](stages, micro_batches)


def test_interleaving_needs_full_rounds() -> None:
    with pytest.raises(ValueError, match=r"multiple of the devices; .* Take 6 micro-batches"):
        interleaved(2, 5)
