"""A stall is a rank that is elsewhere, or all ranks in one place for much too long."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tfdist.cluster import ClusterSpec
from tfdist.control.diagnosis import RankStatus
from tfdist.control.watchdog import Watchdog

TIMEOUT = 0.3


class Control:
    """A channel over which the other rank says what it is in."""

    spec = ClusterSpec(rank=0, size=2)

    def __init__(self, *other_is_in: str) -> None:
        self._other = other_is_in

    @contextlib.contextmanager
    def section(self, what: str) -> Iterator[None]:
        self._own = what
        yield

    def status(self) -> list[RankStatus]:
        return [self._status(0, self._own), self._status(1, *self._other)]

    @staticmethod
    def _status(rank: int, *inside: str) -> RankStatus:
        last = inside[-1] if inside else ""
        return RankStatus(rank, "host", 1, True, last, "entered" if inside else "", 1.0, 0.1, inside)


def seconds_until_aborted(
    control: Control, *, bound: float, ranks: list[int] | None = None
) -> tuple[float | None, str]:
    aborted, reasons = threading.Event(), []

    def abort(error: Exception) -> None:
        reasons.append(str(error))
        aborted.set()

    watchdog: Any = Watchdog(control, abort, timeout=TIMEOUT)  # type: ignore[arg-type]
    start = time.monotonic()
    try:
        with watchdog.watch("train step 3", ranks):
            ended = aborted.wait(bound)
    finally:
        watchdog.stop()
    return (time.monotonic() - start if ended else None), "".join(reasons)


def test_a_rank_that_is_elsewhere_is_a_stall() -> None:
    seconds, reason = seconds_until_aborted(Control(), bound=20)
    assert seconds is not None
    assert seconds >= TIMEOUT
    assert "rank 1" in reason
    assert "train step 3" in reason


def test_a_long_step_of_all_ranks_is_none() -> None:
    assert seconds_until_aborted(Control("train step 3"), bound=4 * TIMEOUT) == (None, "")


def test_only_the_ranks_of_a_process_set_must_come() -> None:
    assert seconds_until_aborted(Control(), bound=4 * TIMEOUT, ranks=[0]) == (None, "")


def test_a_step_that_never_ends_on_any_rank_is_one() -> None:
    seconds, reason = seconds_until_aborted(Control("train step 3"), bound=20)
    assert seconds is not None
    assert seconds >= 6 * TIMEOUT
    assert "All ranks have been in 'train step 3'" in reason
    assert "different collectives" in reason


@pytest.mark.parametrize("other", ["train step 2", "train step 4"])
def test_another_step_is_elsewhere(other: str) -> None:
    seconds, reason = seconds_until_aborted(Control(other), bound=20)
    assert seconds is not None
    assert other in reason
