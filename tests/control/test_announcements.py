from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from tfdist.control.announcements import AnnouncementLedger


def ledger_of(*lists: str) -> AnnouncementLedger:
    """Rank i announced the letters of the i-th string, in order."""
    ledger = AnnouncementLedger()
    for rank, signatures in enumerate(lists):
        for signature in signatures:
            ledger.post("key", rank, signature)
    return ledger


def test_repetition_is_no_news() -> None:
    ledger = AnnouncementLedger()
    assert ledger.post("key", 0, "a")
    assert not ledger.post("key", 0, "a")
    assert ledger.post("other", 0, "a")


def test_less_is_no_conflict() -> None:
    assert ledger_of("ab", "a", "").conflicts("key") == []


def test_other_order_is_no_conflict_once_the_sets_are_equal() -> None:
    assert ledger_of("a", "b").conflicts("key")
    assert ledger_of("ab", "ba").conflicts("key") == []


def test_agreement_in_another_order_is_settled_for_good() -> None:
    assert ledger_of("abc", "ba").conflicts("key") == []  # c is only news that rank 1 has not reached yet


def test_conflict_says_who_and_what() -> None:
    (conflict,) = ledger_of("ax", "ax", "ay").conflicts("key")
    assert conflict.ranks == (0, 2)
    assert conflict.signatures == ("x", "y")
    assert conflict.agreed == 1


def test_keys_are_apart() -> None:
    ledger = ledger_of("a")
    ledger.post("other", 1, "b")
    assert ledger.conflicts("key") == ledger.conflicts("other") == []


@given(st.lists(st.sampled_from("abcdef"), unique=True), st.integers(2, 5), st.randoms())
def test_same_set_never_conflicts_in_the_end(
    letters: list[str], size: int, randomness: random.Random
) -> None:
    lists = ["".join(randomness.sample(letters, len(letters))) for _ in range(size)]
    assert ledger_of(*lists).conflicts("key") == []


@given(st.sets(st.sampled_from("abcd"), min_size=1), st.sets(st.sampled_from("abcd"), min_size=1))
def test_different_sets_of_equal_size_conflict(ours: set[str], theirs: set[str]) -> None:
    if len(ours) == len(theirs):
        found = ledger_of("".join(sorted(ours)), "".join(sorted(theirs))).conflicts("key")
        assert bool(found) == (ours != theirs)
