"""Bringing ranks together: gatherings, allocations and announcements, against deadlines.

All waiting happens in the server, so that all ranks of a gathering learn the same outcome: when the first of
those who wait gives up, the gathering has failed for everybody, the late ones included.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from tfdist.control.announcements import AnnouncementLedger, Conflict
from tfdist.control.connection import Connection
from tfdist.control.diagnosis import explain_mismatch, explain_missing, name_ranks
from tfdist.control.frames import Part
from tfdist.control.gatherings import Allocations, Arrival, Failure, Gathering, Gatherings
from tfdist.control.membership import Membership


class Agreement:
    """Serves `exchange`, `allocate` and `announce`.

    Args:
        membership: who is there.
        inquire: asks all ranks what they do, then calls its argument.
        after: calls its second argument in as many seconds as the first says.
        grace: how long differing announcements, or differing checks of those who have arrived, may wait for
            the others, in seconds.

    Attributes:
        next_deadline: when `expire` must be called next.
    """

    def __init__(
        self,
        membership: Membership,
        *,
        inquire: Callable[[Callable[[], None]], None],
        after: Callable[[float, Callable[[], None]], None],
        grace: float,
    ) -> None:
        self.next_deadline = math.inf
        self._membership = membership
        self._inquire = inquire
        self._after = after
        self._grace = grace
        self._gatherings = Gatherings()
        self._allocations = Allocations()
        self._ledger = AnnouncementLedger()
        self._disputes: dict[Conflict, float] = {}

    # Gatherings.

    def join(self, rank: int, header: dict[str, Any], payload: Part) -> None:
        """A rank's `exchange`."""
        ranks = header["ranks"]
        gathering = self._gatherings.join(
            rank,
            Arrival(header["id"], payload, header["check"]),
            key=header["key"],
            ranks=tuple(range(self._membership.size) if ranks is None else ranks),
            operation=header["operation"],
        )
        gathering.failure = gathering.failure or self._membership.failure
        departed = [other for other in gathering.missing if other in self._membership.departed]
        if gathering.failure is not None:
            self._refuse(gathering, [rank])
        elif not gathering.missing:
            self._complete(gathering)
        elif departed:
            self._fail_for_departed(gathering, departed)
        else:
            self._set_deadline(gathering, header["timeout"])

    def _set_deadline(self, gathering: Gathering, patience: float) -> None:
        now = time.monotonic()
        if now + patience < gathering.deadline:
            gathering.deadline, gathering.patience = now + patience, patience
        if gathering.checks:  # it has failed; what is left is to hear what the others send
            gathering.deadline = min(gathering.deadline, now + self._grace)
        # One bound for all gatherings: a timer for each would keep every payload in memory until its
        # deadline.
        self.next_deadline = min(self.next_deadline, gathering.deadline)

    def expire(self) -> None:
        """Ends the gatherings that are overdue."""
        now = time.monotonic()
        if now < self.next_deadline:
            return
        self.next_deadline = math.inf
        for gathering in self._gatherings.unfinished():
            if now < gathering.deadline:
                self.next_deadline = min(self.next_deadline, gathering.deadline)
                continue
            gathering.deadline = math.inf
            if gathering.checks:
                self._fail_gathering(gathering, _mismatch(gathering))
            else:
                self._inquire(functools.partial(self._time_out, gathering))

    def fail_those_waiting_for(self, rank: int) -> None:
        """A rank has left: who waits for it, waits in vain."""
        for gathering in self._gatherings.unfinished():
            if rank in gathering.missing:
                self._fail_for_departed(gathering, [rank])

    def _complete(self, gathering: Gathering) -> None:
        if gathering.checks:
            self._fail_gathering(gathering, _mismatch(gathering))
            return
        self._gatherings.remove(gathering)
        for rank in gathering.ranks:
            others = [gathering.arrivals[other].payload for other in gathering.ranks if other != rank]
            self._tell(rank, {"type": "result", "id": gathering.arrivals[rank].request}, others)

    def _time_out(self, gathering: Gathering) -> None:
        if gathering.failure is not None or not gathering.missing:
            return  # they came while the others were being asked
        text = explain_missing(
            self._membership.statuses(),
            waiting_for=gathering.operation,
            ranks=gathering.ranks,
            missing=gathering.missing,
            waited=gathering.patience,
            extra="\n".join(
                f"  {name_ranks(other.arrivals)} waits under the same key, but for {name_ranks(other.ranks)}."
                for other in self._gatherings.same_key(gathering)
            ),
        )
        self._fail_gathering(gathering, ("CollectiveTimeoutError", text))

    def _fail_for_departed(self, gathering: Gathering, departed: Sequence[int]) -> None:
        text = (
            f"{gathering.operation!r} can't complete: {name_ranks(departed)} already left the world by "
            "`tfdist.shutdown()` or a regular end. Every rank must call the same collectives before it ends."
        )
        self._fail_gathering(gathering, ("PeerLostError", text))

    def _fail_gathering(self, gathering: Gathering, failure: Failure) -> None:
        gathering.failure = failure
        self._refuse(gathering, list(gathering.arrivals))

    def _refuse(self, gathering: Gathering, ranks: Sequence[int]) -> None:
        """Gives the stored failure to `ranks`; the gathering stays until the late ones got it too."""
        assert gathering.failure is not None
        error, message = gathering.failure
        for rank in ranks:
            request = gathering.arrivals[rank].request
            self._tell(rank, {"type": "error", "id": request, "error": error, "message": message})
        if not gathering.missing:
            self._gatherings.remove(gathering)

    def _tell(self, rank: int, header: dict[str, Any], parts: Sequence[Part] = ()) -> None:
        connection = self._membership.present.get(rank)
        if connection is not None:
            connection.send(header, parts)

    # Allocations.

    def allocate(self, connection: Connection, header: dict[str, Any]) -> None:
        """A rank's `allocate`."""
        answer = self._membership.failure or self._allocations.reserve(header["key"], header["count"])
        if isinstance(answer, int):
            connection.send({"type": "allocated", "id": header["id"], "first": answer})
        else:
            error, message = answer
            connection.send({"type": "error", "id": header["id"], "error": error, "message": message})

    # Announcements.

    def announce(self, rank: int, key: str, signature: str) -> None:
        """A rank's `announce`; starts a grace period for each new conflict."""
        if not self._ledger.post(key, rank, signature):
            return
        current = self._ledger.conflicts(key)
        for conflict in [conflict for conflict in self._disputes if conflict.key == key]:
            if conflict not in current:
                del self._disputes[conflict]
        for conflict in current:
            if conflict not in self._disputes:
                self._disputes[conflict] = time.monotonic()
                self._after(self._grace, functools.partial(self._judge, conflict))

    def _judge(self, conflict: Conflict) -> None:
        since = self._disputes.get(conflict)
        if since is None or time.monotonic() - since < self._grace:
            return  # settled, or settled and renewed: then another timer runs
        text = explain_mismatch(self._ledger.announced(conflict.key), operation=conflict.key)
        self._membership.fail("CollectiveMismatchError", f"{text} (They differed for {self._grace:g} s.)")


def _mismatch(gathering: Gathering) -> Failure:
    text = explain_mismatch(gathering.checks, operation=gathering.operation, missing=gathering.missing)
    return ("CollectiveMismatchError", text)
