"""Pure bookkeeping of the server: who has arrived where. No sockets, no clocks.

A gathering is one meeting of a group of ranks under a key. Keys may be used again: a rank's call joins the
oldest unfinished gathering in which it is not yet, so its k-th call meets the k-th calls of the others. A
gathering that failed stays until every rank came and got the error, so a late rank never waits for peers that
gave up, and the calls after it line up again.
"""

from __future__ import annotations

import dataclasses

from tfdist.control.frames import Part

Failure = tuple[str, str]  # name of an exception class in tfdist.errors, and its message
_Place = tuple[str, tuple[int, ...]]


@dataclasses.dataclass
class Arrival:
    """One rank's call: the id it gave its request, its payload, and what must be equal on all ranks."""

    request: int
    payload: Part
    check: str | None


@dataclasses.dataclass(eq=False)
class Gathering:
    """One meeting of `ranks` under `key`.

    Attributes:
        operation: what the user called, for messages.
        arrivals: who is there.
        deadline: when the first of the waiting ranks gives up.
        patience: the bound that rank had set, in seconds.
        failure: set once the gathering can no longer succeed.
    """

    key: str
    ranks: tuple[int, ...]
    operation: str
    arrivals: dict[int, Arrival] = dataclasses.field(default_factory=dict)
    deadline: float = float("inf")
    patience: float = 0.0
    failure: Failure | None = None

    @property
    def missing(self) -> list[int]:
        return [rank for rank in self.ranks if rank not in self.arrivals]

    @property
    def checks(self) -> dict[int, str]:
        """What each rank sent that must be equal; empty if all do (or none sent any)."""
        checks = {rank: arrival.check for rank, arrival in self.arrivals.items()}
        if len(set(checks.values())) <= 1:
            return {}
        return {rank: "nothing to compare" if check is None else check for rank, check in checks.items()}


class Gatherings:
    """All unfinished gatherings."""

    def __init__(self) -> None:
        self._open: dict[_Place, list[Gathering]] = {}

    def join(
        self, rank: int, arrival: Arrival, *, key: str, ranks: tuple[int, ...], operation: str
    ) -> Gathering:
        """Puts `rank` into the gathering it belongs to."""
        line = self._open.setdefault((key, ranks), [])
        for gathering in line:
            if rank not in gathering.arrivals:
                break
        else:
            gathering = Gathering(key, ranks, operation)
            line.append(gathering)
        gathering.arrivals[rank] = arrival
        return gathering

    def remove(self, gathering: Gathering) -> None:
        """Forgets a gathering that every rank has reached."""
        place = (gathering.key, gathering.ranks)
        line = self._open.get(place, [])
        if gathering in line:
            line.remove(gathering)
        if not line:
            self._open.pop(place, None)

    def unfinished(self) -> list[Gathering]:
        """Gatherings that can still succeed."""
        return [gathering for line in self._open.values() for gathering in line if gathering.failure is None]

    def same_key(self, gathering: Gathering) -> list[Gathering]:
        """Others under the same key whose group shares a rank: probably groups that differ by mistake."""
        return [
            other
            for other in self.unfinished()
            if other.key == gathering.key
            and other.ranks != gathering.ranks
            and not set(other.ranks).isdisjoint(gathering.ranks)
        ]


class Allocations:
    """A counter that hands out consecutive integers, the same to every rank that asks under the same key."""

    def __init__(self) -> None:
        self._next = 1
        self._reserved: dict[str, tuple[int, int]] = {}

    def reserve(self, key: str, count: int) -> int | Failure:
        first, size = self._reserved.setdefault(key, (self._next, count))
        if size != count:
            return (
                "CollectiveMismatchError",
                f"Ranks disagree in allocate({key!r}): this rank asks for {count} integers, another asked "
                f"for {size} under the same key. Use another key, or the same count on all ranks.",
            )
        if first == self._next:
            self._next += count
        return first
