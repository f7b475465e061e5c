"""Ring data parallelism: every rank holds the whole model and optimizer; gradients are all-reduced.

Each rank sends and receives 2(N-1)/N·K bytes per step for K bytes of gradients (Patarasuk and Yuan 2009).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfdist.strategies.base import Apply, Gradients, Strategy


class Ring(Strategy):
    """Reduces gradients over all ranks, then every rank makes the same update."""

    name = "ring"

    def update(
        self,
        gradients: Gradients,
        variables: Sequence[Any],
        apply: Apply,
        *,
        optimizer: Any,
        weighed_by: Any = None,
    ) -> Any:
        return apply(self.reducer.reduce(gradients, variables, weighed_by=weighed_by), variables)
