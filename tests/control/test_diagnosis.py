from __future__ import annotations

from tfdist.control.diagnosis import (
    RankStatus,
    explain_mismatch,
    explain_missing,
    guess_missing,
    name_ranks,
)


def status(rank: int, section: str = "", state: str = "", inside: tuple[str, ...] = ()) -> RankStatus:
    return RankStatus(rank, f"host{rank}", 100 + rank, True, section, state, 3.25, 0.5, inside)


def test_name_ranks() -> None:
    assert name_ranks([]) == "no rank"
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([2, 0]) == "ranks 0, 2"
    assert name_ranks(range(100)).endswith("15, … (100 in all)")


def test_missing_are_those_neither_in_it_nor_just_out_of_it() -> None:
    statuses = [
        status(0, "inner", "entered", ("sum", "inner")),
        status(1, "sum", "left"),
        status(2, "evaluate", "entered", ("evaluate",)),
        status(3),
    ]
    assert guess_missing(statuses, "sum", range(4)) == [2, 3]


def test_text_names_rank_host_pid_activity_causes_and_fixes() -> None:
    text = explain_missing(
        [status(0), status(1, "evaluate", "entered"), status(2, "sum 1", "left")],
        waiting_for="sum 2",
        ranks=[0, 1, 2],
        missing=[1, 2],
        waited=5,
    )
    assert "ranks 1, 2 did not arrive at 'sum 2' within 5 s; 1 of 3 ranks are there (rank 0)" in text
    assert "rank 1 (host host1, pid 101): it entered 'evaluate' 3.2 s ago and is still in it" in text
    assert "rank 2 (host host2, pid 102): it finished 'sum 1' 3.2 s ago and entered nothing since" in text
    assert "another branch" in text
    assert "tfdist.init(timeout=...)" in text


def test_rank_that_has_left_is_not_said_to_be_in_anything_still() -> None:
    gone = RankStatus(1, "b", 7, False, "train step 4", "entered", 2.0, 2.0, ("train step 4",))
    text = explain_missing([status(0), gone], waiting_for="train step 5", ranks=[0, 1], missing=[1])
    assert "rank 1 (host b, pid 7): it has left the world; it entered 'train step 4'" in text
    assert "was in it when last heard of" in text
    assert "still" not in text


def test_mismatch_puts_equal_ranks_together() -> None:
    text = explain_mismatch({0: "float32 [2]", 1: "float32 [3]", 2: "float32 [2]"}, operation="sum")
    assert "ranks 0, 2 sent float32 [2]; rank 1 sent float32 [3]." in text
