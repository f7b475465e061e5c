"""Plans of recomputation against trying everything."""

from __future__ import annotations

import itertools
import math

import hypothesis
import hypothesis.strategies as st
import pytest

from tfdist.layers import cuts, least_work
from tfdist.layers.cuts import Chain

SIZES = st.lists(st.integers(0, 9), min_size=1, max_size=8)


def equal(count: int) -> Chain:
    return Chain([10] * count, [10] * (count - 1))


def chains() -> st.SearchStrategy[Chain]:
    def with_across(kept: list[int]) -> st.SearchStrategy[Chain]:
        count = len(kept) - 1
        return st.lists(st.integers(0, 9), min_size=count, max_size=count).map(
            lambda across: Chain(kept, across)
        )

    return SIZES.flatmap(with_across)


def all_ends(count: int) -> list[tuple[int, ...]]:
    return [
        (*inner, count)
        for number in range(count)
        for inner in itertools.combinations(range(1, count), number)
    ]


def peak(chain: Chain, ends: tuple[int, ...]) -> int:
    sizes = [sum(chain.kept[start:end]) for start, end in zip((0, *ends), ends, strict=False)]
    return sum(chain.across[end - 1] for end in ends[:-1]) + max(sizes)


@pytest.mark.parametrize("count", [16, 49, 100, 256])
def test_equal_layers_make_about_root_n_blocks(count: int) -> None:
    plan = cuts.least_memory(equal(count))
    root = math.isqrt(count)
    assert abs(len(plan.ends) - root) <= root // 4
    assert plan.peak <= 10 * (2 * root)
    assert plan.recomputed == set(range(len(plan.ends)))


@hypothesis.given(chains())
@hypothesis.settings(max_examples=100, deadline=None, derandomize=True)
def test_least_memory_is_the_least(chain: Chain) -> None:
    plan = cuts.least_memory(chain)
    assert plan.peak == peak(chain, plan.ends)
    best = min(peak(chain, ends) for ends in all_ends(len(chain.kept)))
    assert plan.peak <= best * 1.15 + 1, "sizes of blocks are tried in steps"


@hypothesis.given(chains(), st.integers(1, 8))
@hypothesis.settings(max_examples=50, deadline=None, derandomize=True)
def test_number_of_blocks_is_kept(chain: Chain, number: int) -> None:
    plan = cuts.in_blocks(chain, number)
    assert len(plan.ends) <= number
    assert plan.ends[-1] == len(chain.kept)
    assert list(plan.ends) == sorted(set(plan.ends))


@hypothesis.given(chains(), st.integers(0, 60))
@hypothesis.settings(max_examples=100, deadline=None, derandomize=True)
def test_budget_is_kept(chain: Chain, budget: int) -> None:
    plan = least_work.within(chain, budget)
    if plan is None:
        assert cuts.least_memory(chain).peak > budget
    else:
        assert plan.peak <= budget
        assert bool(plan.recomputed) == (sum(chain.kept) > budget)


def works(chain: Chain, budget: int) -> list[int]:
    """Bytes recomputed by every plan that fits."""
    found = []
    for ends in all_ends(len(chain.kept)):
        sizes = [sum(chain.kept[start:end]) for start, end in zip((0, *ends), ends, strict=False)]
        for flags in itertools.product([False, True], repeat=len(ends)):
            again = [size for size, flag in zip(sizes, flags, strict=True) if flag]
            crossing = sum(
                chain.across[end - 1] for k, end in enumerate(ends[:-1]) if flags[k] or flags[k + 1]
            )
            if crossing + sum(sizes) - sum(again) + max(again, default=0) <= budget:
                found.append(sum(again))
    return found


@hypothesis.given(chains(), st.integers(0, 60))
@hypothesis.settings(max_examples=150, deadline=None, derandomize=True)
def test_least_work_is_the_least(chain: Chain, budget: int) -> None:
    plan = least_work.within(chain, budget)
    possible = works(chain, budget)
    if plan is None:
        assert not possible
        return
    starts = (0, *plan.ends)
    assert sum(sum(chain.kept[starts[k] : plan.ends[k]]) for k in plan.recomputed) == min(possible)


@pytest.mark.parametrize("part", [0.2, 0.5, 0.8])
def test_long_chain_of_large_layers(part: float) -> None:
    count = 128
    kept = [(1 + place % 7) * 1_000_003 for place in range(count)]
    chain = Chain(kept, [300_007 * (1 + place % 3) for place in range(count - 1)])
    plan = least_work.within(chain, int(part * sum(kept)))
    assert plan is not None
    assert plan.peak <= part * sum(kept)
    starts = (0, *plan.ends)
    work = sum(sum(kept[starts[k] : plan.ends[k]]) for k in plan.recomputed)
    assert work >= (1 - part) * sum(kept), "what is freed must have been recomputed"
    assert part < 0.5 or work <= (1.25 - part) * sum(kept)


def test_a_larger_budget_recomputes_less() -> None:
    chain = equal(36)
    work = [
        len(plan.recomputed) / len(plan.ends)
        for b in (125, 200, 300)
        if (plan := least_work.within(chain, b))
    ]
    assert len(work) == 3
    assert work[0] > work[1] > work[2] > 0


def test_cuts_lie_where_little_crosses() -> None:
    chain = Chain([10] * 8, [50, 1, 50, 50, 50, 1, 50])
    assert set(cuts.least_memory(chain).ends) <= {2, 6, 8}
