"""Which server keeps which variable: decided once, by bytes, the same on every rank. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def assign_owners(sizes: Sequence[int], servers: int) -> list[int]:
    """Gives every variable a server, the largest first, each to the server that has the least so far.

    The fullest server has at most 4/3 - 1/(3·servers) times what it would have in the best division.

    Args:
        sizes: bytes of each variable.
        servers: how many servers there are, at least 1.

    Returns:
        The server of each variable, 0-based.

    Example:
        >>> assign_owners([100, 400, 300, 200], servers=2)
        [0, 0, 1, 1]

    Reference: Graham 1969, "Bounds on multiprocessing timing anomalies".
    """
    owners = [0] * len(sizes)
    load = [0] * servers
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        owners[place] = min(range(servers), key=lambda server: load[server])
        load[owners[place]] += sizes[place]
    return owners
