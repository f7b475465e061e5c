"""Runs the contract suite in every world."""

from tests.collectives.contract import Contract
from tests.worlds import everywhere


@everywhere
class TestContract(Contract):
    """In the worlds of `tests.worlds.ALL`."""
