"""Out-of-band control channel between ranks: agreement, heartbeat, and who is missing.

(INTERFACE ONLY FOR NOW; see the class docstring.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tfdist.cluster import ClusterSpec


class ControlPlane:
    """One authenticated TCP connection per rank to a small server inside rank 0's process."""

    spec: ClusterSpec
    roster: list[dict[str, Any]]  # every rank's `hello`, in rank order

    @classmethod
    def connect(cls, spec: ClusterSpec, *, hello: dict[str, Any], timeout: float) -> ControlPlane:
        """Start-up barrier: returns once all `spec.size` ranks are there, or raises CollectiveTimeoutError."""
        raise NotImplementedError

    def exchange(
        self, key: str, payload: Any, *, ranks: Sequence[int] | None = None, timeout: float | None = None
    ) -> list[Any]:
        """Blocks until every rank of `ranks` called with the same `key`; returns their payloads in that order."""
        raise NotImplementedError

    def announce(self, key: str, payload: Any) -> None:
        """Posts without waiting; when two ranks announce different payloads for `key`, all ranks fail."""
        raise NotImplementedError

    def allocate(self, key: str, count: int = 1) -> int:
        """First of `count` consecutive integers reserved for `key`, equal on all ranks; never waits for peers."""
        raise NotImplementedError

    @contextlib.contextmanager
    def section(self, what: str) -> Iterator[None]:
        """Marks what this rank is in, for the diagnosis that peers print."""
        raise NotImplementedError

    def diagnose(self, waiting_for: str, ranks: Sequence[int] | None = None) -> str:
        """Text: which ranks are missing from `waiting_for`, what each last entered, since when, on which host."""
        raise NotImplementedError

    def on_failure(self, callback: Callable[[Exception], None]) -> None:
        """Registers what is called (in the control thread) when a peer is lost or an announcement mismatches."""
        raise NotImplementedError

    @property
    def failure(self) -> Exception | None:
        """The first failure seen, if any."""
        raise NotImplementedError

    def close(self) -> None:
        """Orderly goodbye: peers do not take this rank's end for a failure."""
        raise NotImplementedError
