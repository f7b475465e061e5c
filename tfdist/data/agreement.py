"""All ranks must shard the same data in the same way; otherwise shards overlap without any error.

Each rank states its facts over the control channel and compares them with rank 0's. That costs one message
per `shard` call, none per step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfdist import world
from tfdist.errors import OutOfSyncError


def agree(facts: Mapping[str, Any], *, proposal: int) -> int:
    """Checks that all ranks hold the same `facts`; every rank calls it.

    Args:
        facts: what must be equal, by name; plain values that can be written as JSON.
        proposal: a number of which rank 0's becomes everyone's, such as a random seed.

    Returns:
        Rank 0's proposal.

    Raises:
        OutOfSyncError: ranks hold different facts; names the fact, the ranks and their values.
        CollectiveTimeoutError: a rank did not call within the world's timeout.
    """
    here = world.current()
    if here.control is None:
        return proposal
    said = {"facts": dict(facts), "proposal": proposal}
    answers = here.control.exchange("shard", said, describe="tfdist.shard")
    for rank, answer in enumerate(answers):
        _compare(answers[0]["facts"], answer["facts"], rank=rank)
    return int(answers[0]["proposal"])


def _compare(expected: Mapping[str, Any], found: Mapping[str, Any], *, rank: int) -> None:
    for name in sorted(set(expected) | set(found)):
        if expected.get(name) != found.get(name):
            raise OutOfSyncError(
                "tfdist.shard needs the same data and arguments on every rank, because it deals out one "
                f"common order. Received a different {name}: rank 0 has {expected.get(name)!r}, rank {rank} "
                f"has {found.get(name)!r}. Load the same data on every rank (with the same seeds, before any "
                "splitting by rank); data that are already split by rank go to `fit` as they are."
            )
