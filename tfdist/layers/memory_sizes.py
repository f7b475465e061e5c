"""Amounts of memory as people write them."""

from __future__ import annotations

import re

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


def bytes_of_text(memory: str | int) -> int:
    """Bytes, from a number of them or from text.

    Raises:
        ValueError: no such text.

    Example:
        >>> bytes_of_text("1.5GB"), bytes_of_text("2MiB")
        (1500000000, 2097152)
    """
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([KMG]?I?)B?\s*", str(memory), re.IGNORECASE)
    if found is None or found[2].upper() not in _UNITS:
        raise ValueError(f'`memory` is a number of bytes, or text such as "4GB"; received {memory!r}.')
    return int(float(found[1]) * _UNITS[found[2].upper()])


def text_of_bytes(size: int) -> str:
    """Text with one decimal.

    Example:
        >>> text_of_bytes(1_230_000)
        '1.2 MB'
    """
    for unit, factor in (("GB", 10**9), ("MB", 10**6)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size / 1e3:.1f} KB"
