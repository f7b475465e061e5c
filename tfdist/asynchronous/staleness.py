"""How stale a gradient is when it is applied, and the rule that bounds it; pure bookkeeping.

Definition: the staleness of a step is the number of updates that are applied after it began to read the weights and
before its own update. 0 means that it is the gradient of the very weights to which it is applied.

That at most s + 1 steps are under way does not bound it: while one slow step runs, the other workers can pass
it any number of times. Nor need updates wait for their turn: a slow step would then hold up those that are
ready, which makes them staler. A step that reads at version v must be applied at version v + s at the latest;
that is a deadline, and one update is applied at a time. So:

- a step may start if with it no more than s + 1 are under way: then each finds a place before its deadline;
- a step may be applied if the others, in the order of their deadlines, still find a place each (Liu and
  Layland 1973:
  earliest deadline first finds an order whenever there is one).

What may not be applied yet waits, and so does its worker if nothing else may start. The step whose deadline
is first may always be applied, so nothing waits for ever. With s = 0 one step runs at a time.

Example, s = 2, three workers; the third is slow and read at version 0:

    version      0   1   2            3
    applied        a   b   c waits      c       c, which read at 2, may not pass: the slow one's deadline is 2
    slow one     read ------------ apply
"""

from __future__ import annotations

import threading


class StalenessBound:
    """Counts updates, and says what may start and what may be applied.

    Threads may call it at the same time.

    Args:
        bound: greatest staleness allowed; None for any.

    Attributes:
        version: updates applied so far.
    """

    def __init__(self, bound: int | None) -> None:
        self.bound = bound
        self.version = 0
        self._read_at: dict[int, int] = {}
        self._lock = threading.Lock()

    def may_begin(self, under_way: int) -> bool:
        """Whether one more step may start while so many are under way, those that wait for a worker included."""
        return self.bound is None or under_way <= self.bound

    def begin(self, step: int) -> None:
        """A step begins to read the weights; once more if its first worker was lost."""
        with self._lock:
            self._read_at[step] = self.version

    def may_apply(self, step: int) -> bool:
        """Whether all other steps that have begun can still keep the bound if this one is applied next."""
        if self.bound is None:
            return True
        with self._lock:
            others = sorted(read for other, read in self._read_at.items() if other != step)
        return all(read + self.bound >= self.version + 1 + place for place, read in enumerate(others))

    def apply(self, step: int) -> int:
        """The update of a step has been applied.

        Returns:
            The staleness of that step.
        """
        with self._lock:
            staleness = self.version - self._read_at.pop(step)
            self.version += 1
        return staleness

    def drop(self, step: int) -> None:
        """A step will never be applied."""
        with self._lock:
            self._read_at.pop(step, None)
