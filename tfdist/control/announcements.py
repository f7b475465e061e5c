"""Ledger of announcements: do all ranks trace the same collectives?

Each rank's distinct signatures under a key are kept in order of arrival. Two ranks conflict when, after the
longest stretch in which both announced the same set, the next signatures of both exist and differ. That alone
proves nothing: ranks may trace the same functions in another order. So the server lets a conflict stand for a
grace period; if the sets have not become equal by then, the ranks do run different collectives.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Conflict:
    """Two ranks announced different signatures behind `agreed` equal ones."""

    key: str
    ranks: tuple[int, int]
    agreed: int
    signatures: tuple[str, str]


class AnnouncementLedger:
    """Signatures by key and rank; pure."""

    def __init__(self) -> None:
        self._signatures: dict[str, dict[int, list[str]]] = {}

    def post(self, key: str, rank: int, signature: str) -> bool:
        """Notes an announcement; False if this rank made the same one before."""
        own = self._signatures.setdefault(key, {}).setdefault(rank, [])
        if signature in own:
            return False
        own.append(signature)
        return True

    def conflicts(self, key: str) -> list[Conflict]:
        """Pairs of ranks that disagree now."""
        by_rank = sorted(self._signatures.get(key, {}).items())
        # Equal lists are compared once: usually all ranks agree, and then this takes time linear in their
        # number.
        kinds: dict[tuple[str, ...], int] = {}
        for rank, signatures in by_rank:
            kinds.setdefault(tuple(signatures), rank)
        distinct = list(kinds.items())
        found = []
        for place, (ours, rank) in enumerate(distinct):
            for theirs, other in distinct[place + 1 :]:
                agreed = _equal_stretch(ours, theirs)
                if agreed < min(len(ours), len(theirs)):
                    found.append(Conflict(key, (rank, other), agreed, (ours[agreed], theirs[agreed])))
        return found

    def announced(self, key: str) -> dict[int, str]:
        """Text of what each rank announced under `key`, for the error message."""
        return {rank: " then ".join(own) for rank, own in self._signatures.get(key, {}).items()}


def _equal_stretch(ours: tuple[str, ...], theirs: tuple[str, ...]) -> int:
    """Largest n for which the first n signatures of both are the same set."""
    stretch = 0
    unmatched: set[str] = set()
    for place in range(min(len(ours), len(theirs))):
        unmatched ^= {ours[place]}
        unmatched ^= {theirs[place]}
        if not unmatched:
            stretch = place + 1
    return stretch
