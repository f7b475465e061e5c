"""What a strategy is: it takes this rank's gradients and makes the inner optimizer apply the global ones."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from tfdist.gradients import GradientReducer

Gradients = Sequence[Any]
Apply = Callable[[list[Any]], Any]

# Name that the user writes -> module of tfdist.strategies and class in it.
STRATEGIES = {"ring": "Ring"}


class Strategy(abc.ABC):
    """Turns local gradients into one global update.

    Attributes:
        name: what the user writes in `init(strategy=...)`.
        reducer: combines gradients over ranks as the user's arguments ask.
    """

    name: ClassVar[str]

    def __init__(self, reducer: GradientReducer) -> None:
        self.reducer = reducer

    @abc.abstractmethod
    def update(
        self, gradients: Gradients, variables: Sequence[Any], apply: Apply, *, weighed_by: Any = None
    ) -> Any:
        """Calls `apply` with global gradients, one per variable, so that all ranks end with equal variables.

        Args:
            gradients: this rank's gradients: dense tensors, `tf.IndexedSlices`, or None.
            variables: the variables they belong to.
            apply: applies a list of gradients to `variables`.
            weighed_by: the rank's share of the step, if `gradients` were multiplied by it already.
        """
