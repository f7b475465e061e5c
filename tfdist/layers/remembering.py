"""Values that a replay takes from the first run instead of computing them again.

Problem: a layer that asks other ranks would ask them a second time when it is recomputed.

Solution: it computes what comes from them through `remembered`. Outside of a recording that is a plain call; a
recording keeps the results in order, and a replay hands them out again. They are few and small.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


class _Current(threading.local):
    keep: tuple[list[Any], ...] = ()
    give: Iterator[Any] | None = None
    asking = False
    forbidden: str | None = None


_current = _Current()


def remembered(compute: Callable[[], T]) -> T:
    """`compute()`, or in a replay what it returned in the first run: tensors, constant to differentiation.

    Raises:
        ValueError: where it is forbidden.
    """
    if _current.forbidden is not None:
        raise ValueError(_current.forbidden)
    if _current.give is not None:
        result: T = next(_current.give)
    else:
        before, _current.asking = _current.asking, True
        try:
            result = compute()
        finally:
            _current.asking = before
    for results in _current.keep:
        results.append(result)
    return result


def is_asking() -> bool:
    """Whether a `compute` of `remembered` is at work, which will not be replayed."""
    return _current.asking


@contextlib.contextmanager
def keeping(results: list[Any]) -> Iterator[None]:
    """Inside, results go to `results`, too, in order."""
    before, _current.keep = _current.keep, (*_current.keep, results)
    try:
        yield
    finally:
        _current.keep = before


@contextlib.contextmanager
def giving(results: list[Any]) -> Iterator[None]:
    """Inside, results come from `results`."""
    before = _current.keep, _current.give
    _current.keep, _current.give = (), iter(results)
    try:
        yield
    finally:
        _current.keep, _current.give = before


@contextlib.contextmanager
def forbidding(reason: str) -> Iterator[None]:
    """Inside, `remembered` raises a ValueError."""
    before, _current.forbidden = _current.forbidden, reason
    try:
        yield
    finally:
        _current.forbidden = before
