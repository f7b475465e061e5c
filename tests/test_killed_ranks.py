"""Whichever rank is killed, and whenever: the others end, know whom they lost, and the files load."""

from __future__ import annotations

import random

import pytest

from tests import killed_ranks
from tests.conftest import require

pytestmark = pytest.mark.alone


@pytest.mark.parametrize(("backend", "size"), killed_ranks.WORLDS)
def test_kill(backend: str, size: int) -> None:
    require(backend)
    assert killed_ranks.kill_one(backend, size, random.Random())["faults"] == []
