"""Strategies by what the user writes."""

from __future__ import annotations

import pytest

from tfdist.errors import TfdistError
from tfdist.strategies import choice


def test_equal_strategies_are_written_alike() -> None:
    assert choice.check("ring", 4) == choice.check(" ring() ", 4) == "ring"
    assert choice.check("parameter_server( servers=2)", 4) == "parameter_server(servers=2)"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("star", "must be one of ring, parameter_server, async_parameter_server.*received 'star'"),
        ("parameter_server(2)", r"options in parentheses.*received 'parameter_server\(2\)'"),
        ("parameter_server(servers=", "received 'parameter_server"),
        ("__import__('os').getpid()", "received"),
        ("parameter_server(servers=open('x'))", "received"),
        ("auto(servers=2)", "auto takes no options; received servers"),
        ("ring(servers=2)", "ring takes no options; received servers"),
        ("parameter_server(k=2)", "takes servers=k, dedicated=True or False, and server_loss.*received k"),
        ("parameter_server(servers=5)", "needs k <= 4 among 4 ranks; received 5"),
        ("parameter_server(servers=4, dedicated=True)", "k <= 3 among 4 ranks, of which one must be left"),
        ("parameter_server(dedicated=1)", "is True or False; received 1"),
        ("parameter_server(server_loss=2)", r"server_loss=.* is True or False; received 2"),
        ("parameter_server(servers=0)", "received 0"),
        ("parameter_server(servers=True)", "received True"),
        ("mirrored", 'is one process with several devices; received 4 ranks. Use "multi_worker_mirrored"'),
        ("central_storage(devices=2)", "is one process"),
        ("multi_worker_mirrored(devices=0)", "needs an integer k >= 1; received 0"),
        ("multi_worker_mirrored(servers=2)", "takes devices=k; received servers"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(TfdistError, match=message):
        choice.check(text, 4)


def test_alone_any_number_of_servers_will_do() -> None:
    assert choice.check("parameter_server(servers=3, dedicated=True)", 1).startswith("parameter_server(")


def test_who_computes_gradients() -> None:
    for everyone in ("ring", "auto", "parameter_server(servers=3)"):
        assert choice.dedicated(everyone) == 0
    assert choice.dedicated("parameter_server(dedicated=True)") == 1
    assert choice.dedicated("parameter_server(servers=3, dedicated=True)") == 3
