"""The least recomputation of a chain of layers that fits into a budget; pure.

Problem: blocks that are recomputed take time, blocks that keep all take memory. Which layers are which, and where
blocks end, must be chosen together.

Solution: with a bound on the largest recomputed block the peak of `cuts` is a sum over the chain,

    peak <= bound + Σ bytes across the cuts + Σ bytes of layers that keep all

so dynamic programming finds, for each amount of work, the fewest bytes across the cuts; then the least work whose
peak fits is taken. Bounds are tried in turn: the sizes of all possible blocks, or some of them if they are many.
Work counts in bytes of what is recomputed, in at most `_LEVELS` steps, so in long chains the result may recompute
some hundredths of a layer more than it must, but never exceeds the budget.

Source: Jain et al. 2020, "Checkmate", for blocks of consecutive layers in place of single values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from tfdist.layers.cuts import Chain, Plan, block_bounds, block_sizes, least_memory, peak_of

_LEVELS = 512
_BOUNDS = 40
_NEVER = np.iinfo(np.int64).max // 4


def within(chain: Chain, budget: int) -> Plan | None:
    """The least recomputation with a peak within `budget` bytes; None if there is none.

    Args:
        chain: what is kept.
        budget: bytes for activations.
    """
    count, total = len(chain.kept), sum(chain.kept)
    if total <= budget:
        return Plan((count,), frozenset(), total)
    least = least_memory(chain)
    best = least if least.peak <= budget else None
    for bound in _bounds(chain):
        work = total + bound - budget  # less can't be enough, since something may cross
        if best is None or work < _work(chain, best):
            table = _Table(chain, bound, total if best is None else _work(chain, best))
            plan = next((each for each in table.plans(work) if each.peak <= budget), None)
            if plan is not None and (best is None or _key(chain, plan) < _key(chain, best)):
                best = plan
    return best


@dataclasses.dataclass
class _Step:
    """For each amount of work, how the layers up to one place end."""

    across: npt.NDArray[np.int64]  # fewest bytes across the cuts
    start: npt.NDArray[np.int64]  # first layer of the block that ends here


class _Table:
    """The fewest bytes across the cuts for each amount of work, with recomputed blocks of at most `bound` bytes."""

    def __init__(self, chain: Chain, bound: int, most: int) -> None:
        self._chain = chain
        self._unit = max(1, -(-sum(chain.kept) // _LEVELS))
        before = np.concatenate([[0], np.cumsum(chain.kept, dtype=np.int64)])
        # Rounded sums, not sums of rounded sizes: so the error does not grow along the chain.
        self._before = before // self._unit
        levels = int(most // self._unit) + 2
        self._cut = [0, *chain.across]
        first = np.searchsorted(before, before - bound)
        self._recomputed = [_empty(levels)]
        self._kept = [_empty(levels)]
        self._kept[0].across[0] = 0
        for end in range(1, len(chain.kept) + 1):
            self._kept.append(self._keep(end))
            self._recomputed.append(self._recompute(end, int(first[end]), levels))

    def plans(self, work: int) -> Iterator[Plan]:
        """Plans of at least about `work` bytes of work, the least first."""
        last = len(self._chain.kept)
        for level in range(max(0, work // self._unit - 1), len(self._kept[0].across)):
            for is_kept, steps in ((True, self._kept), (False, self._recomputed)):
                if steps[last].across[level] < _NEVER:
                    yield self._plan(level, is_kept=is_kept)

    def _best_before(self, place: int) -> npt.NDArray[np.int64]:
        fewest = np.minimum(self._kept[place].across, self._recomputed[place].across)
        return np.asarray(fewest + self._cut[place])

    def _keep(self, end: int) -> _Step:
        """Layer `end - 1` keeps all: it joins the layers before, or is the first behind a recomputed block."""
        joined, behind = self._kept[end - 1], self._recomputed[end - 1].across + self._cut[end - 1]
        joins = joined.across <= behind
        return _Step(np.where(joins, joined.across, behind), np.where(joins, joined.start, end - 1))

    def _recompute(self, end: int, first: int, levels: int) -> _Step:
        """A recomputed block ends with layer `end - 1`."""
        made = _empty(levels)
        for start in range(first, end):
            size = int(self._before[end] - self._before[start])
            if size >= levels:
                continue
            across = self._best_before(start)[: levels - size]
            better = across < made.across[size:]
            made.across[size:][better] = across[better]
            made.start[size:][better] = start
        return made

    def _plan(self, level: int, *, is_kept: bool) -> Plan:
        ends, recomputes, place = [], [], len(self._chain.kept)
        while place:
            step = (self._kept if is_kept else self._recomputed)[place]
            start = int(step.start[level])
            ends.append(place)
            recomputes.append(not is_kept)
            if is_kept:
                is_kept = False
            else:
                level -= int(self._before[place] - self._before[start])
                is_kept = bool(self._kept[start].across[level] <= self._recomputed[start].across[level])
            place = start
        ends.reverse()
        blocks = {number for number, each in enumerate(reversed(recomputes)) if each}
        return Plan(tuple(ends), frozenset(blocks), peak_of(self._chain, ends, blocks))


def _empty(levels: int) -> _Step:
    return _Step(np.full(levels, _NEVER, np.int64), np.zeros(levels, np.int64))


def _bounds(chain: Chain) -> list[int]:
    """Sizes of the largest recomputed block to try."""
    count = len(chain.kept)
    if count * (count + 1) // 2 <= _BOUNDS:
        before = np.concatenate([[0], np.cumsum(chain.kept)])
        return sorted({int(before[j] - before[i]) for i in range(count) for j in range(i + 1, count + 1)})
    tried = block_bounds(chain)
    return tried[:: -(-len(tried) // _BOUNDS)]


def _work(chain: Chain, plan: Plan) -> int:
    sizes = block_sizes(chain, plan.ends)
    return sum(sizes[block] for block in plan.recomputed)


def _key(chain: Chain, plan: Plan) -> tuple[int, int]:
    return _work(chain, plan), len(plan.recomputed)
