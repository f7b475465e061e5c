"""Plans of recomputation against trying everything."""

from __future__ import annotations

import itertools
import math

import hypothesis
import hypothesis.strategies as st
import pytest

from tfdist.layers import cuts
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
    plan = cuts.within(chain, budget)
    if plan is None:
        assert cuts.least_memory(chain).peak > budget
    else:
        assert plan.peak <= budget
        assert bool(plan.recomputed) == (sum(chain.kept) > budget)


def test_a_larger_budget_recomputes_less() -> None:
    chain = equal(36)
    work = [len(plan.recomputed) / len(plan.ends) for b in (125, 200, 300) if (plan := cuts.within(chain, b))]
    assert len(work) == 3
    assert work[0] > work[1] > work[2] > 0


def test_cuts_lie_where_little_crosses() -> None:
    chain = Chain([10] * 8, [50, 1, 50, 50, 50, 1, 50])
    assert set(cuts.least_memory(chain).ends) <= {2, 6, 8}
