"""Which rank does what under `async_parameter_server`: one runs the script, some keep variables, the others
compute.

    rank 0: chief   ranks 1..k: servers   ranks k+1..N-1: workers

The chief comes first because rank 0 is the rank that prints, saves and reads the terminal everywhere else, too. A
worker keeps nothing that others need, so the job goes on without it; not so without the chief or a server.

It needs no TensorFlow, so that the launcher can read it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tfdist.errors import TfdistError
from tfdist.strategies.notation import parse

NAME = "async_parameter_server"


@dataclasses.dataclass(frozen=True)
class Roles:
    """What ranks are.

    Attributes:
        servers: ranks that keep the variables.
        workers: ranks that compute gradients.
    """

    servers: tuple[int, ...]
    workers: tuple[int, ...]

    @classmethod
    def deal(cls, ranks: int, *, servers: int) -> Roles:
        """The roles among so many ranks.

        Example:
            >>> Roles.deal(4, servers=1)
            Roles(servers=(1,), workers=(2, 3))
        """
        return cls(tuple(range(1, 1 + servers)), tuple(range(1 + servers, ranks)))

    def task(self, rank: int) -> tuple[str, int]:
        """TensorFlow's job and task number of a rank."""
        if rank == 0:
            return "chief", 0
        if rank in self.servers:
            return "ps", self.servers.index(rank)
        return "worker", self.workers.index(rank)


def check_options(ranks: int, **options: Any) -> None:
    """Raises TfdistError for options that make no sense among `ranks` ranks."""
    unknown = set(options) - {"servers", "max_staleness"}
    if unknown:
        raise TfdistError(
            f"{NAME} takes servers=k and max_staleness=s; received {', '.join(sorted(unknown))}."
        )
    servers, bound = options.get("servers", 1), options.get("max_staleness")
    if not isinstance(servers, int) or isinstance(servers, bool) or servers < 1:
        raise TfdistError(f"{NAME}(servers=k) needs an integer k >= 1; received {servers!r}.")
    if bound is not None and (not isinstance(bound, int) or isinstance(bound, bool) or bound < 0):
        raise TfdistError(
            f"{NAME}(max_staleness=s) is a number of updates, an integer >= 0, or None for no bound; received "
            f"{bound!r}."
        )
    # A script that is run alone just trains.
    if ranks > 1 and ranks < servers + 2:
        raise TfdistError(
            f"{NAME}(servers={servers}) needs at least {servers + 2} ranks: the chief, {servers} server"
            f"{'s' if servers > 1 else ''} and one worker; received {ranks}. Start more ranks, or take fewer "
            "servers."
        )


def roles_of(strategy: str, ranks: int) -> Roles | None:
    """The roles under a strategy, as the user wrote it; None where every rank runs the script.

    Example:
        >>> roles_of("async_parameter_server(servers=2)", 5)
        Roles(servers=(1, 2), workers=(3, 4))
        >>> roles_of("ring", 5)
    """
    if ranks == 1 or not strategy.strip().startswith(NAME):
        return None
    _, options = parse(strategy, [NAME])
    check_options(ranks, **options)
    return Roles.deal(ranks, servers=options.get("servers", 1))
