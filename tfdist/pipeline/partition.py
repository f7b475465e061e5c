"""The best contiguous cut of a chain of nodes into stages; pure.

The slowest stage sets the pace of a pipeline, so the best cut has the least cost in its costliest stage; of those
that are equal in that, it is the one whose cuts the fewest bytes cross. Dynamic programming over (stage, last node)
finds it exactly in O(S·n²), once for the pace and once for the bytes.

Source: the linear partition problem; Harlap et al. 2018, "PipeDream: fast and efficient pipeline parallel DNN
training", for dynamic programming over layers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np


def best_cut(
    costs: Sequence[float],
    stages: int,
    *,
    across: Sequence[float] | None = None,
    uncut: Collection[int] = (),
    pins: Mapping[int, int] | None = None,
) -> tuple[int, ...]:
    """Where each stage ends.

    Args:
        costs: of each node, at least 0, in any one unit.
        stages: how many, each of at least one node.
        across: bytes that cross each boundary; boundary b, 1 to n-1, is before node b, and `across[b-1]` its bytes.
        uncut: boundaries that must not be cut.
        pins: stage of each node that has to be on one.

    Returns:
        For each stage the number of the node after it; the last is the number of nodes.

    Raises:
        ValueError: no such cut.

    Example:
        >>> best_cut([1, 1, 1, 3, 1, 1], 3)
        (3, 4, 6)
    """
    count, pins = len(costs), dict(pins or {})
    _check(count, stages, uncut, pins)
    before = np.concatenate([[0.0], np.cumsum(np.asarray(costs, np.float64))])
    cost_of_start = np.zeros(count + 1)
    cost_of_start[1:count] = 0.0 if across is None else np.asarray(across, np.float64)
    cost_of_start[[*uncut]] = np.inf
    misplaced = _misplaced(count, stages, pins)

    pace, _ = _search(before, np.where(np.isinf(cost_of_start), np.inf, 0.0), misplaced, np.inf)
    if not np.isfinite(pace):
        raise ValueError(
            f"Stages are runs of consecutive layers, {stages} of them; received pins {pins} (node: stage) that no "
            "such cut fulfils together with the layers that share variables. Pin fewer layers, or in the order in "
            "which they run."
        )
    _, ends = _search(before, cost_of_start, misplaced, pace * (1 + 1e-12))
    return ends


def boundaries_inside(groups: Sequence[Sequence[int]]) -> set[int]:
    """Boundaries that would part the nodes of a group, for groups that must stay on one stage."""
    return {boundary for group in groups for boundary in range(min(group) + 1, max(group) + 1)}


def _misplaced(count: int, stages: int, pins: Mapping[int, int]) -> Any:
    """For each stage, how many of the first k nodes are pinned to another."""
    wrong = np.zeros([stages, count + 1], np.int64)
    for node, stage in pins.items():
        wrong[np.arange(stages) != stage, node + 1] += 1
    return np.cumsum(wrong, axis=1)


def _search(before: Any, cost_of_start: Any, misplaced: Any, bound: float) -> tuple[float, tuple[int, ...]]:
    """The costliest stage and its cut if `bound` is infinite, else the cheapest cuts with stages up to `bound`."""
    stages, count = len(misplaced), len(before) - 1
    best = np.full([stages + 1, count + 1], np.inf)
    step = np.zeros([stages + 1, count + 1], np.int64)
    best[0, 0] = 0.0
    for stage in range(stages):
        for end in range(stage + 1, count + 1):
            own = before[end] - before[:end]
            own[misplaced[stage, end] > misplaced[stage, :end]] = np.inf
            own[own > bound] = np.inf
            former = best[stage, :end] + cost_of_start[:end]
            total = np.maximum(former, own) if np.isinf(bound) else np.where(np.isinf(own), np.inf, former)
            step[stage + 1, end] = start = int(np.argmin(total))
            best[stage + 1, end] = total[start]
    ends, place = [], count
    for stage in range(stages, 0, -1):
        ends.append(place)
        place = int(step[stage, place])
    return float(best[stages, count]), tuple(reversed(ends))


def _check(count: int, stages: int, uncut: Collection[int], pins: Mapping[int, int]) -> None:
    if stages < 1:
        raise ValueError(f"A pipeline has at least one stage; received stages={stages}.")
    most = count - len(set(uncut))
    if stages > most:
        raise ValueError(
            f"Each stage needs a layer of its own; received stages={stages} for a model of {count} layers that can "
            f"be cut into at most {most} stages, as layers that share variables stay together. "
            f"Take stages={max(most, 1)} or fewer."
        )
    outside = {node: stage for node, stage in pins.items() if not 0 <= stage < stages}
    if outside:
        raise ValueError(
            f"Layers are pinned to stages 0 to {stages - 1}; received pins {outside} (node: stage)."
        )
