"""What a strategy is: it takes this rank's gradients and makes the inner optimizer apply the global ones."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from tfdist.collectives.base import Group
from tfdist.errors import TfdistError
from tfdist.gradients import GradientReducer

Gradients = Sequence[Any]
Apply = Callable[[Sequence[Any], Sequence[Any]], Any]


class Strategy(abc.ABC):
    """Turns local gradients into one global update.

    Attributes:
        name: what the user writes in `init(strategy=...)`.
        reducer: combines gradients over ranks as the user's arguments ask.
        group: the ranks that train together.
    """

    name: ClassVar[str]

    def __init__(self, reducer: GradientReducer, group: Group) -> None:
        self.reducer = reducer
        self.group = group

    @classmethod
    def check(cls, ranks: int, **options: Any) -> None:
        """Raises TfdistError for options that make no sense among `ranks` ranks."""
        if options:
            raise TfdistError(f"Strategy {cls.name} takes no options; received {', '.join(options)}.")

    @abc.abstractmethod
    def update(
        self,
        gradients: Gradients,
        variables: Sequence[Any],
        apply: Apply,
        *,
        optimizer: Any,
        weighed_by: Any = None,
    ) -> Any:
        """Calls `apply` with global gradients, so that all ranks end with equal variables.

        Args:
            gradients: this rank's gradients: dense tensors, `tf.IndexedSlices`, or None.
            variables: the variables they belong to.
            apply: applies gradients to variables.
            optimizer: what applies them: the inner optimizer, or a LossScaleOptimizer around all.
            weighed_by: the rank's share of the step, if `gradients` were multiplied by it already.
        """

    def build(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Builds the inner optimizer for all variables of the model."""
        optimizer.build(variables)

    def finalize(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Has the inner optimizer put its moving averages into the variables at the end of training."""
        optimizer.finalize_variable_values(variables)
