"""The one initialised world of this process.

`runtime.init` sets it, `runtime.shutdown` clears it, everything else reads it through `current()`.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from tfdist.collectives.base import Engine, Group
from tfdist.errors import NotInitializedError

if TYPE_CHECKING:
    from tfdist.cluster import ClusterSpec
    from tfdist.control import ControlPlane
    from tfdist.control.watchdog import Watchdog


@dataclasses.dataclass(frozen=True)
class World:
    """What `init()` decided.

    Attributes:
        spec: place of this process.
        engine: moves tensors.
        control: out-of-band channel to the other ranks; None at size 1.
        strategy: name of the strategy, `ring` by default.
        timeout: bound in seconds of every wait for another rank.
        everyone: the group of all ranks.
        watchdog: bounds waits inside the engine; None at size 1.
        dedicated: how many ranks, from the first on, compute no gradients.
        devices: how many devices of a process compute gradients of rows of their own.
        is_placed: whether `tf.distribute` places replicas on them.
    """

    spec: ClusterSpec
    engine: Engine
    control: ControlPlane | None
    strategy: str
    timeout: float
    everyone: Group
    watchdog: Watchdog | None = None
    dedicated: int = 0
    devices: int = 1
    is_placed: bool = False


_current: World | None = None


def install(world: World | None) -> None:
    """Sets or clears the current world; only `runtime` calls this."""
    global _current
    _current = world


def is_initialized() -> bool:
    """Whether `tfdist.init()` was called and `tfdist.shutdown()` was not."""
    return _current is not None


def current() -> World:
    """The initialised world.

    Raises:
        NotInitializedError: before `tfdist.init()` or after `tfdist.shutdown()`.
    """
    if _current is None:
        raise NotInitializedError(
            "tfdist is not initialised. Call `tfdist.init()` once at the start of the script, before "
            "anything that needs the other ranks."
        )
    return _current


def rank() -> int:
    """Number of this process in the world, 0-based."""
    return current().spec.rank


def size() -> int:
    """Number of processes in the world."""
    return current().spec.size


def local_rank() -> int:
    """Number of this process among the world's processes on its host; the index of its GPU."""
    return current().spec.local_rank


def local_size() -> int:
    """Number of the world's processes on this host."""
    return current().spec.local_size


def cross_rank() -> int:
    """Number of this host among the world's hosts."""
    return current().spec.cross_rank


def cross_size() -> int:
    """Number of hosts in the world."""
    return current().spec.cross_size


def replicas() -> int:
    """How many compute gradients, ranks times devices of each: the factor between a batch and the global batch."""
    return (current().spec.size - current().dedicated) * current().devices


def is_alone() -> bool:
    """Whether only this process runs the script: a world of one rank, or one where the others serve it."""
    return current().everyone.size == 1


def replica() -> int | None:
    """Number of this process among those that compute gradients; None if it does not."""
    number = rank() - current().dedicated
    return number if number >= 0 else None


def backend() -> str:
    """Name of the collective engine in use: `single`, `tf` or `horovod`."""
    return current().engine.name
