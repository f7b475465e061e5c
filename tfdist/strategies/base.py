"""What a strategy is: it takes this rank's gradients and makes the inner optimizer apply the global ones."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from tfdist.collectives.base import Group
from tfdist.errors import TfdistError
from tfdist.gradients import GradientReducer
from tfdist.world import World

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

    @classmethod
    def dedicated(cls, **options: Any) -> int:
        """How many ranks, from the first on, compute no gradients."""
        return 0

    def refuse(self, arguments: Mapping[str, Any]) -> None:  # noqa: B027 - most strategies take all
        """Raises TfdistError for arguments of `DistributedOptimizer` that the strategy can't honour."""

    @classmethod
    def places_replicas(cls) -> bool:
        """Whether several devices of a process compute gradients, in `tfdist.scope()`; see `replicated.py`."""
        return False

    @classmethod
    def distribution(cls, here: World) -> Any:
        """A new `tf.distribute.Strategy`, where there is one under the scope."""
        return None

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

    def run(self, gradients: Gradients, variables: Sequence[Any], optimizer: Any, update: Any) -> None:
        """Combines gradients in replica context; only where `places_replicas()`, see `replicated.py`."""
        raise NotImplementedError

    def on_each_device(
        self, optimizer: Any, variables: Sequence[Any], act: Callable[[Sequence[Any], int], Any]
    ) -> None:
        """Calls `act(variables, number)` for each device that updates, on its copies of variables; as `run`."""
        raise NotImplementedError

    def settle(self, optimizer: Any, variables: Sequence[Any]) -> Strategy:
        """The strategy that will train these variables; called once, by all ranks, before `build`."""
        return self

    def build(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Builds the inner optimizer for all variables of the model."""
        optimizer.build(variables)

    @property
    def served_loss(self) -> Any:
        """Computes the loss of all ranks' outputs, see `served_loss.py`; None where each rank has its own."""
        return None

    @property
    def divides_state(self) -> bool:
        """Whether ranks keep different parts of the optimizer's slots."""
        return False

    def gather(self, variables: Sequence[Any]) -> list[Any]:
        """Values of the optimizer's variables, on the first rank of the group; only where state is divided."""
        raise NotImplementedError

    def written(self) -> None:  # noqa: B027 - nothing is divided
        """Waits until the rank that writes what was gathered has done so."""

    def leave(self, failure: str) -> bool:
        """Notes that `fit()` has failed; all ranks call it, those where another failed with an empty text.

        Returns:
            Whether the others were waiting for this rank in `gather`, and know now.
        """
        return False

    def restore(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        """Sets the optimizer's variables, those that this rank keeps; only where state is divided."""
        raise NotImplementedError

    def spread(self, variables: Sequence[Any], root: int) -> None:  # noqa: B027 - nothing is divided
        """Gives each rank what the last `restore` on rank `root` had for it; all ranks call it."""

    def finalize(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Has the inner optimizer put its moving averages into the variables at the end of training."""
        optimizer.finalize_variable_values(variables)
