"""Shortens long lists that differ to the places where they do.

A model has hundreds of gradients; when one rank lacks one of them, a message that lists all of them for every
rank hides the one that matters.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterator, Sequence

_LONG = 400  # characters; shorter texts are shown in full
_CONTEXT = 1  # equal parts shown on either side of a difference
_MOST = 12  # differing parts shown per list
_PATIENCE = 500  # parts up to which the best alignment is searched for; its time may grow with their square
_SEPARATOR = re.compile(r", (?![^\[\]]*\])")  # not the commas inside a shape


def shorten_differing(texts: Sequence[str]) -> list[str]:
    """Leaves out of long comma-separated lists what is equal in all of them; short ones stay whole.

    Args:
        texts: the lists; the others are compared with the first.

    Returns:
        The lists in the same order, with `… 48 the same …` in place of equal parts.

    Example:
        >>> layers = [f"layer_{i}: float32[64, 64]" for i in range(100)]
        >>> for text in shorten_differing([", ".join(layers), ", ".join(layers[:50] + layers[51:])]):
        ...     print(text.replace(": float32[64, 64]", ""))
        layer_0, … 48 the same …, layer_49, layer_50, layer_51, … 48 the same … (100 in all)
        layer_0, … 48 the same …, layer_49, layer_51, … 48 the same … (99 in all)
    """
    if len(texts) < 2 or max(map(len, texts)) <= _LONG:
        return list(texts)
    first, *others = (_SEPARATOR.split(text) for text in texts)
    pairs = [list(_differences(first, other)) for other in others]
    return [
        _show(first, [here for found in pairs for here, _ in found]),
        *(_show(other, [there for _, there in found]) for other, found in zip(others, pairs, strict=True)),
    ]


def _differences(first: list[str], other: list[str]) -> Iterator[tuple[range, range]]:
    """Places that differ, in both lists; an empty range stands where the other list has more."""
    shorter = min(len(first), len(other))
    start = next((i for i in range(shorter) if first[i] != other[i]), shorter)
    end = next((i for i in range(shorter - start) if first[-1 - i] != other[-1 - i]), shorter - start)
    middles = first[start : len(first) - end], other[start : len(other) - end]
    if max(map(len, middles)) > _PATIENCE:
        yield range(start, len(first) - end), range(start, len(other) - end)
        return
    for what, a, b, c, d in difflib.SequenceMatcher(None, *middles, autojunk=False).get_opcodes():
        if what != "equal":
            yield range(start + a, start + b), range(start + c, start + d)


def _show(parts: list[str], ranges: list[range]) -> str:
    """The first part, which may begin with what the list is about, and those at and around differences."""
    differing = sorted({place for places in ranges for place in places})
    limit = differing[_MOST] if len(differing) > _MOST else len(parts)
    around = {place for r in ranges for place in range(max(0, r.start - _CONTEXT), r.stop + _CONTEXT)}
    visible = sorted(place for place in {0, *around} if place < limit)
    words = []
    for place, following in itertools.pairwise([*visible, len(parts)]):
        words.append(parts[place])
        hidden = range(place + 1, following)
        differ = len(set(differing).intersection(hidden))
        if differ:
            words.append(f"… {len(hidden)} more, of which {differ} differ …")
        elif hidden:
            words.append(f"… {len(hidden)} the same …")
    return f"{', '.join(words)} ({len(parts)} in all)"
