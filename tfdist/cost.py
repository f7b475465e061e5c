"""What a training step costs to communicate, and to keep in memory, by strategy: models on paper. Pure.

For N ranks, K bytes of weights (and as many of gradients), L seconds that a message costs whoever sends or receives
it, and B bytes a second in each direction of every rank's link:

    strategy               a rank sends, at most       seconds for that
    ring                   2(N-1)/N · K                2(N-1) · (L + K/(N·B))
    parameter_server, k    (N+k-2)/k · K               2(N-1) · (L + K/(k·B))

In a ring, N-1 turns scatter sums and N-1 gather them, each a message of K/N. A server receives the gradients of the
N-1 others for its K/k, then sends its values to them; the k servers work side by side, and links carry both
directions at once. With one server that is 2(N-1)·K through one link; with N servers as much as in the ring, in as
many messages.

All of them move 2(N-1)·K bytes in total. Ranks that share what moves them, as processes of one machine share its
cores and its memory, therefore take the same time for that, whatever the strategy: `Link(shared=True)`.

References: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations"; Thakur,
Rabenseifner, Gropp 2005, "Optimization of collective communication operations in MPICH"; Li et al. 2014, "Scaling
distributed machine learning with the parameter server".
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Link:
    """How fast a rank talks to others.

    Attributes:
        latency: seconds that a message of no bytes costs.
        bandwidth: bytes a second, in each direction at once.
        shared: whether all ranks have this one bandwidth between them, as processes of one machine do.
    """

    latency: float
    bandwidth: float
    shared: bool = False

    def __post_init__(self) -> None:
        if not (self.latency >= 0.0 and self.bandwidth > 0.0):
            raise ValueError(
                f"A link needs a latency of at least 0 s and a bandwidth above 0 bytes/s; received {self}."
            )


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes of one step at the rank that has most to do, and the time of the step's communication.

    Attributes:
        sent: bytes that it sends.
        received: bytes that it receives.
        seconds: from the last gradient to the new weights on all ranks, if nothing overlaps.
    """

    sent: float
    received: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes that a rank keeps through a step, without activations.

    Attributes:
        weights: the model's.
        gradients: this rank's own, and those that it receives.
        slots: the optimizer's.
    """

    weights: float
    gradients: float
    slots: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.gradients + self.slots


def ring(ranks: int, payload: float, link: Link) -> Traffic:
    """A step by ring all-reduce.

    Args:
        ranks: number of ranks, at least 1.
        payload: bytes of gradients.
        link: of each rank.

    Example:
        >>> ring(4, 1e6, Link(latency=0.0, bandwidth=1e9))
        Traffic(sent=1500000.0, received=1500000.0, seconds=0.0015)
    """
    _check(ranks, payload)
    turns = 2 * (ranks - 1)
    moved = turns / ranks * payload
    return Traffic(moved, moved, turns * link.latency + _transfer(ranks, payload, moved, link))


def parameter_server(ranks: int, payload: float, link: Link, *, servers: int = 1) -> Traffic:
    """A synchronous step by `servers` servers that also train, and divide the variables evenly.

    Args:
        ranks: number of ranks, servers included.
        payload: bytes of gradients.
        link: of each rank.
        servers: from 1 to `ranks`.

    Example:
        >>> parameter_server(4, 1e6, Link(latency=0.0, bandwidth=1e9))
        Traffic(sent=3000000.0, received=3000000.0, seconds=0.006)
    """
    _check(ranks, payload, servers)
    moved = (ranks + servers - 2) / servers * payload
    messages = 2 * (ranks - 1)
    at_a_server = messages / servers * payload
    return Traffic(moved, moved, messages * link.latency + _transfer(ranks, payload, at_a_server, link))


def ring_memory(payload: float, *, slots: float = 2.0) -> Memory:
    """What every rank keeps with `ring`.

    Args:
        payload: bytes of weights.
        slots: slots of the optimizer per weight: 2 for Adam, 1 for momentum, 0 for SGD.
    """
    _check(1, payload)
    return Memory(payload, payload, slots * payload)


def parameter_server_memory(
    ranks: int, payload: float, *, servers: int = 1, slots: float = 2.0
) -> tuple[Memory, Memory]:
    """What a server keeps, and what a rank that is none.

    Args:
        ranks: number of ranks, servers included.
        payload: bytes of weights.
        servers: from 1 to `ranks`.
        slots: see `ring_memory`.
    """
    _check(ranks, payload, servers)
    share = payload / servers
    return (
        Memory(payload, payload + (ranks - 1) * share, slots * share),
        Memory(payload, payload, 0.0),
    )


def fitted_link(ranks: int, payload: float, *, latency: float, seconds: float, shared: bool) -> Link:
    """The link with which `ring` takes the times that were measured.

    Args:
        ranks: number of ranks, at least 2.
        payload: bytes of a large all-reduce.
        latency: seconds of an all-reduce of hardly any bytes.
        seconds: of the large one.
        shared: whether the ranks share the link.

    Example:
        >>> fitted_link(2, 1e6, latency=0.5, seconds=1.5, shared=False)
        Link(latency=0.25, bandwidth=1000000.0, shared=False)
    """
    turns = 2 * (ranks - 1)
    passing = max(seconds - latency, 1e-9)
    moved = turns * payload if shared else turns / ranks * payload
    return Link(max(latency, 0.0) / turns, moved / passing, shared)


def _transfer(ranks: int, payload: float, at_the_busiest: float, link: Link) -> float:
    """Seconds in which the busiest rank's bytes pass, or all ranks' through a link that they share."""
    return (2 * (ranks - 1) * payload if link.shared else at_the_busiest) / link.bandwidth


def _check(ranks: int, payload: float, servers: int = 1) -> None:
    if not 1 <= servers <= ranks or payload < 0:
        raise ValueError(
            "A model of cost needs 1 <= servers <= ranks and a payload of at least 0 bytes; received "
            f"ranks={ranks}, servers={servers}, payload={payload}."
        )
