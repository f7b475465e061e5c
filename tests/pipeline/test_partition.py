"""The cut is the best of all: against exhaustive search."""

from __future__ import annotations

import doctest
import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist.pipeline import partition
from tfdist.pipeline.partition import best_cut, boundaries_inside


def stage_of(node: int, ends: Sequence[int]) -> int:
    return sum(node >= end for end in ends)


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(1, 8))
def test_no_cut_is_better(data: st.DataObject, count: int) -> None:
    costs = data.draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    across = data.draw(st.lists(st.integers(0, 9), min_size=count - 1, max_size=count - 1))
    stages = data.draw(st.integers(1, count))
    nodes = st.integers(0, count - 1)
    pins = data.draw(st.dictionaries(nodes, st.integers(0, stages - 1), max_size=2))
    group = data.draw(st.lists(nodes, min_size=1, max_size=2))
    uncut = boundaries_inside([group])

    def quality(ends: Sequence[int]) -> tuple[int, int]:
        starts = [0, *ends[:-1]]
        pace = max(sum(costs[start:end]) for start, end in zip(starts, ends, strict=True))
        return pace, sum(across[end - 1] for end in ends[:-1])

    possible = [
        ends
        for inner in itertools.combinations(sorted(set(range(1, count)) - uncut), stages - 1)
        for ends in [(*inner, count)]
        if all(stage_of(node, ends) == stage for node, stage in pins.items())
    ]
    if not possible:
        with pytest.raises(ValueError, match=r"received (stages|pins)"):
            best_cut(costs, stages, across=across, uncut=uncut, pins=pins)
        return
    found = best_cut(costs, stages, across=across, uncut=uncut, pins=pins)
    assert found in possible
    assert quality(found) == min(quality(ends) for ends in possible)


def test_example() -> None:
    assert doctest.testmod(partition).failed == 0


def test_too_many_stages() -> None:
    with pytest.raises(ValueError, match=r"stages=4 for a model of 4 layers .* at most 3 .* Take stages=3"):
        best_cut([1.0] * 4, 4, uncut=[2])


def test_pins_out_of_range() -> None:
    with pytest.raises(ValueError, match=r"stages 0 to 1; received pins \{0: 2\}"):
        best_cut([1.0] * 4, 2, pins={0: 2})


def test_pins_out_of_order() -> None:
    with pytest.raises(ValueError, match=r"no such cut fulfils .* Pin fewer"):
        best_cut([1.0] * 4, 2, pins={0: 1, 2: 0})


def test_no_stage() -> None:
    with pytest.raises(ValueError, match="received stages=0"):
        best_cut([1.0], 0)
