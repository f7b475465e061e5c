"""Whichever rank is killed, and whenever: the others end, know whom they lost, and the files load."""

from __future__ import annotations

import random

import pytest

from tests import killed_ranks
from tests.conftest import require


@pytest.mark.parametrize("backend", ["tf", "horovod"])
def test_kill(backend: str) -> None:
    require(backend)
    chance = random.Random()
    runs = [killed_ranks.kill_one(backend, 2, chance) for _ in range(2)]
    assert killed_ranks.report(runs)["faults"] == 0, runs
