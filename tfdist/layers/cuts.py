"""Where to cut a chain of layers into blocks that are recomputed; pure.

Training that recomputes blocks keeps what crosses the cuts, and, one block at a time, all that is inside a block:

    peak = Σ bytes across the cuts + max over blocks of Σ bytes kept inside

For n equal layers the least is at √n blocks (Chen et al. 2016). In general, for a bound on the largest block,
dynamic programming over the chain finds the cuts with the fewest bytes across, and all bounds of interest are
tried. Given a budget, `least_work` recomputes no more than it takes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

_BOUNDS = 64  # sizes of the largest block that are tried


@dataclasses.dataclass(frozen=True)
class Chain:
    """What training of a chain of layers keeps.

    Attributes:
        kept: bytes that the backward pass needs of each layer.
        across: bytes that are alive between each layer and the next: one fewer.
    """

    kept: Sequence[int]
    across: Sequence[int]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Blocks of consecutive layers.

    Attributes:
        ends: number of the layer after each block; the last is the number of layers.
        recomputed: numbers of the blocks that are recomputed; the others keep all.
        peak: bytes that activations take.
    """

    ends: tuple[int, ...]
    recomputed: frozenset[int]
    peak: int


def least_memory(chain: Chain) -> Plan:
    """The cuts with the lowest peak: √n blocks for n equal layers."""
    return min(_partitions(chain, len(chain.kept)), key=lambda plan: (plan.peak, len(plan.ends)))


def in_blocks(chain: Chain, number: int) -> Plan:
    """At most `number` blocks, with the lowest peak."""
    return min(_partitions(chain, number), key=lambda plan: (plan.peak, len(plan.ends)))


def block_sizes(chain: Chain, ends: Sequence[int]) -> list[int]:
    """Bytes that the layers of each block keep."""
    starts = [0, *ends[:-1]]
    return [sum(chain.kept[start:end]) for start, end in zip(starts, ends, strict=True)]


def peak_of(chain: Chain, ends: Sequence[int], recomputed: set[int]) -> int:
    """Bytes that activations take if these blocks are recomputed."""
    sizes = block_sizes(chain, ends)
    # What crosses into a block that is kept as a whole is counted as the inside of the one before, if that is, too.
    across = sum(
        chain.across[end - 1]
        for block, end in enumerate(ends[:-1])
        if block in recomputed or block + 1 in recomputed
    )
    whole = sum(size for block, size in enumerate(sizes) if block not in recomputed)
    return across + whole + max((sizes[block] for block in recomputed), default=0)


def _partitions(chain: Chain, most: int) -> Iterator[Plan]:
    """The best cuts for each bound on the size of a block, at most `most` blocks."""
    for bound in block_bounds(chain):
        ends = _cheapest_cuts(chain, bound, most)
        if ends is not None:
            recomputed = set(range(len(ends)))
            yield Plan(ends, frozenset(recomputed), peak_of(chain, ends, recomputed))


def block_bounds(chain: Chain) -> list[int]:
    """Sizes of the largest block to try, from that of one layer to that of all."""
    least, total = max(chain.kept), sum(chain.kept)
    if least == 0:
        return [0]
    ratio = (total / least) ** (1.0 / _BOUNDS)
    tried = {total, *(int(least * ratio**i) for i in range(_BOUNDS))}
    # Equal shares, which for equal layers are exact.
    tried |= {max(least, -(-total // blocks)) for blocks in range(1, min(len(chain.kept), 2 * _BOUNDS) + 1)}
    return sorted(tried)


def _cheapest_cuts(chain: Chain, bound: int, most: int) -> tuple[int, ...] | None:
    """Ends of at most `most` blocks of at most `bound` bytes with the fewest bytes across the cuts.

    None if it takes more blocks.
    """
    count = len(chain.kept)
    before = np.concatenate([[0], np.cumsum(chain.kept, dtype=np.int64)])
    cut = np.concatenate([[0], np.asarray(chain.across, np.int64)])
    # One number orders by bytes and then blocks, or, where blocks are few, by blocks and then bytes.
    cost_of_start = cut + (int(cut.sum()) + 1) if most < count else cut * (count + 1) + 1
    cost = np.zeros(count + 1, np.int64)
    blocks = np.zeros(count + 1, np.int64)
    step = np.zeros(count + 1, np.int64)
    first = np.searchsorted(before, before - bound)
    for end in range(1, count + 1):
        low = int(first[end])
        costs = cost[low:end] + cost_of_start[low:end]
        start = low + int(np.argmin(costs))
        cost[end], blocks[end], step[end] = costs[start - low], blocks[start] + 1, start
    if blocks[count] > most:
        return None
    ends, place = [], count
    while place:
        ends.append(place)
        place = int(step[place])
    return tuple(reversed(ends))
