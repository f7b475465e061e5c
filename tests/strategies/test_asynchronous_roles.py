"""Who does what under `async_parameter_server`."""

from __future__ import annotations

import pytest

from tfdist.errors import TfdistError
from tfdist.strategies import choice
from tfdist.strategies.asynchronous_roles import Roles, roles_of


def test_chief_servers_workers() -> None:
    roles = roles_of("async_parameter_server( servers = 2, max_staleness=4)", 6)
    assert roles == Roles(servers=(1, 2), workers=(3, 4, 5))
    tasks = [roles.task(rank) for rank in range(6)]
    assert tasks == [("chief", 0), ("ps", 0), ("ps", 1), ("worker", 0), ("worker", 1), ("worker", 2)]
    assert choice.dedicated("async_parameter_server(servers=2)") == 3


def test_other_strategies_and_a_script_alone_have_none() -> None:
    assert roles_of("ring", 4) is roles_of("", 4) is roles_of("parameter_server(servers=2)", 4) is None
    assert roles_of("async_parameter_server(servers=7)", 1) is None


@pytest.mark.parametrize(
    ("options", "ranks", "message"),
    [
        ("servers=3", 4, "needs at least 5 ranks: the chief, 3 servers and one worker; received 4"),
        ("", 2, "needs at least 3 ranks: the chief, 1 server and one worker; received 2"),
        ("servers=0", 4, "needs an integer k >= 1; received 0"),
        ("servers=True", 4, "needs an integer k >= 1; received True"),
        ("max_staleness=-1", 4, "an integer >= 0, or None for no bound; received -1"),
        ("max_staleness=1.5", 4, "received 1.5"),
        ("dedicated=True", 4, "takes servers=k and max_staleness=s; received dedicated"),
    ],
)
def test_what_is_refused(options: str, ranks: int, message: str) -> None:
    for read in (choice.check, roles_of):
        with pytest.raises(TfdistError, match=message):
            read(f"async_parameter_server({options})", ranks)
