"""Plays one rank of a world in this process, for code that asks its peers over the control channel only.

Worlds of real processes cost seconds each; what a rank does with its peers' answers needs none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tfdist import world
from tfdist.cluster import ClusterSpec
from tfdist.collectives.base import Group


class Peers:
    """A control channel whose other ranks say what this one says, changed by `differ(rank, payload)`."""

    def __init__(self, size: int, differ: Callable[[int, Any], Any]) -> None:
        self.size = size
        self.differ = differ

    def exchange(self, key: str, payload: Any, *, ranks: Sequence[int] | None = None, **_: Any) -> list[Any]:
        return [self.differ(rank, payload) for rank in ranks or range(self.size)]


@contextlib.contextmanager
def as_rank(rank: int, size: int, differ: Callable[[int, Any], Any] = lambda _, said: said) -> Iterator[None]:
    """Inside, this process is `rank` of `size`; `differ` makes the peers' answers from this rank's own."""
    world.install(
        world.World(
            spec=ClusterSpec(rank=rank, size=size),
            engine=None,  # type: ignore[arg-type]  # moves no tensors
            control=Peers(size, differ) if size > 1 else None,  # type: ignore[arg-type]
            strategy="ring",
            timeout=5,
            everyone=Group(tuple(range(size))),
        )
    )
    try:
        yield
    finally:
        world.install(None)
