"""The bound holds whatever the order in which steps begin and end, and nothing waits for ever."""

from __future__ import annotations

import random

import pytest

from tfdist.asynchronous.staleness import StalenessBound


@pytest.mark.parametrize("bound", [0, 1, 2, 5])
@pytest.mark.parametrize("seed", range(20))
def test_random_orders(bound: int, seed: int) -> None:
    chance = random.Random(seed)
    steps = StalenessBound(bound)
    scheduled: list[int] = []
    begun: list[int] = []
    done: list[int] = []
    stalest, number = 0, 0
    while steps.version < 300:
        moves = []
        if steps.may_begin(len(scheduled) + len(begun) + len(done)):
            moves.append("schedule")
        moves += ["begin"] * bool(scheduled) + ["finish"] * bool(begun)
        ready = [each for each in done if steps.may_apply(each)]
        moves += ["apply"] * bool(ready)
        move = chance.choice(moves)  # fails if there is none: then all wait for ever
        if move == "schedule":
            scheduled.append(number)
            number += 1
        elif move == "begin":
            begun.append(scheduled.pop(0))
            steps.begin(begun[-1])
        elif move == "finish":
            # Mostly the newest: the others are slow.
            done.append(begun.pop(-1 if chance.random() < 0.9 else 0))
        else:
            step = chance.choice(ready)
            done.remove(step)
            stalest = max(stalest, steps.apply(step))
    assert stalest <= bound
    assert stalest == bound  # and it is used


def test_without_a_bound_anything_may_happen() -> None:
    steps = StalenessBound(None)
    steps.begin(0)
    for number in range(1, 50):
        assert steps.may_begin(number)
        steps.begin(number)
        assert steps.may_apply(number)
        steps.apply(number)
    assert steps.apply(0) == 49


def test_the_slow_one_of_the_example() -> None:
    steps = StalenessBound(2)
    for each in "abs":
        steps.begin(ord(each))
    steps.apply(ord("a"))
    steps.apply(ord("b"))
    steps.begin(ord("c"))
    assert not steps.may_apply(ord("c"))
    assert steps.may_apply(ord("s"))
    assert steps.apply(ord("s")) == 2
    assert steps.may_apply(ord("c"))


def test_what_is_dropped_or_begun_again_no_longer_counts() -> None:
    steps = StalenessBound(1)
    steps.begin(0)
    steps.begin(1)
    steps.apply(1)
    steps.begin(2)
    assert not steps.may_apply(2)
    steps.begin(0)  # on another worker
    assert steps.may_apply(2)
    steps.drop(0)
    assert steps.apply(2) == 0
