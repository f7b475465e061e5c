"""Runs the contract suite in every usual world."""

from tests.collectives.contract import Contract


class TestContract(Contract):
    """In the worlds of `tests.worlds.USUAL`."""
