"""Process sets: some ranks that run collectives of their own, as Horovod names and numbers them."""

from __future__ import annotations

from collections.abc import Sequence

from tfdist import world
from tfdist.collectives.base import Group
from tfdist.errors import TfdistError


class ProcessSet:
    """Some ranks of the world; usable in collectives once `add_process_set` (or `init`) registered it.

    Attributes:
        ranks: world ranks, ascending.
        process_set_id: number in order of registration, 0 for the whole world; None before it.

    Example:
        >>> import tfdist
        >>> tfdist.init()
        >>> tfdist.ProcessSet([0]).ranks
        [0]
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        """Describes a set; it is registered by `add_process_set`.

        Args:
            ranks: world ranks, each once, in any order.

        Raises:
            TfdistError: not integers, negative, or repeated.
        """
        listed = list(ranks)
        if any(isinstance(rank, bool) or not isinstance(rank, int) or rank < 0 for rank in listed):
            raise TfdistError(f"ProcessSet takes world ranks, integers from 0; received {listed!r}.")
        if len(set(listed)) < len(listed):
            raise TfdistError(f"ProcessSet takes each rank once; received {listed!r}.")
        self._ranks = sorted(listed)
        self._group: Group | None = None
        self._world: world.World | None = None

    @property
    def ranks(self) -> list[int]:
        """World ranks, ascending."""
        return list(self._ranks)

    @property
    def process_set_id(self) -> int | None:
        """Number in order of registration; None while not registered."""
        return self._group.index if self._group is not None and self._is_current() else None

    def size(self) -> int | None:
        """How many ranks it has; None while not registered."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """This process's place in it, -1 outside of it; None while not registered."""
        if self.process_set_id is None:
            return None
        return self.ranks.index(world.rank()) if self.included() else -1

    def included(self) -> bool:
        """Whether this process belongs to it."""
        return world.rank() in self.ranks

    def group(self) -> Group:
        """The registered group.

        Raises:
            TfdistError: not registered in this world.
        """
        if self._group is None or not self._is_current():
            raise TfdistError(
                f"The process set {self.ranks} is not registered in this world. Call "
                "`tfdist.add_process_set(process_set)` on every rank of the world, also on those outside of it."
            )
        return self._group

    def _is_current(self) -> bool:
        return world.is_initialized() and self._world is world.current()

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


class _Everyone(ProcessSet):
    """All ranks of whatever world is initialised."""

    def __init__(self) -> None:
        super().__init__([])

    @property
    def ranks(self) -> list[int]:
        return list(world.current().everyone.ranks)

    @property
    def process_set_id(self) -> int:
        return 0

    def group(self) -> Group:
        return world.current().everyone

    def __repr__(self) -> str:
        return "global_process_set"


global_process_set: ProcessSet = _Everyone()

_registered: tuple[world.World, dict[int, ProcessSet]] | None = None
_created = 0


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Registers a process set; every rank of the world must call it, in the same order, in the set or not.

    No collective may be in flight: Horovod over Gloo starts anew with the set, within a fraction of a second.

    Args:
        process_set: a `ProcessSet`, or world ranks.

    Returns:
        The registered set, usable as `process_set=` of every collective on its ranks.

    Raises:
        TfdistError: a rank outside the world, or the same ranks as an existing set (as in Horovod).
        CollectiveMismatchError: ranks passed different sets.
        BackendUnavailableError: Horovod over MPI, unless `init(process_sets="dynamic")` prepared it.

    Example:
        >>> import tfdist
        >>> tfdist.init()
        >>> tfdist.global_process_set.size()
        1
    """
    global _created
    current = world.current()
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    ranks = added.ranks
    _agree(current, f"add_process_set({ranks})")
    known = _sets_of(current)
    require_distinct([*(other.ranks for other in known.values()), ranks], size=current.spec.size)
    _created += 1
    added._group, added._world = Group(tuple(ranks), _created), current
    current.engine.register(added._group)
    known[_created] = added
    return added


def require_distinct(sets: Sequence[Sequence[int]], *, size: int) -> None:
    """Refuses sets that this world can't have.

    Args:
        sets: ascending ranks of each set.
        size: number of ranks of the world.

    Raises:
        TfdistError: a rank outside the world, no rank, or a set that occurs twice or holds all ranks.
    """
    seen = [list(range(size))]
    for ranks in map(list, sets):
        if not ranks or ranks[-1] >= size:
            raise TfdistError(
                f"A process set holds ranks 0 to {size - 1} of this world, at least one; received {ranks}."
            )
        if ranks in seen:
            raise TfdistError(
                f"A process set of the ranks {ranks} exists already; received it again. Keep and reuse the "
                "object that was registered first (`tfdist.global_process_set` holds all ranks)."
            )
        seen.append(ranks)


def remove_process_set(process_set: ProcessSet) -> bool:
    """Ends a process set; every rank of the world must call it, in the same order.

    Args:
        process_set: registered by `add_process_set`.

    Returns:
        Whether it was registered; the set of all ranks stays and gives False.
    """
    current = world.current()
    _agree(current, f"remove_process_set({process_set.ranks})")
    number = process_set.process_set_id
    if not number:
        return False
    current.engine.forget(process_set.group())
    _sets_of(current).pop(number, None)
    process_set._group = None
    return True


def registered(current: world.World) -> list[list[int]]:
    """Ranks of each set of this world."""
    return [process_set.ranks for process_set in _sets_of(current).values()]


def _sets_of(current: world.World) -> dict[int, ProcessSet]:
    global _registered, _created
    if _registered is None or _registered[0] is not current:
        _registered, _created = (current, {}), 0
    return _registered[1]


def _agree(current: world.World, operation: str) -> None:
    if current.control is not None:
        current.control.exchange(
            "process sets", None, check=operation, describe="add or remove a process set"
        )
