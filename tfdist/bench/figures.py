"""Medians, ratios and tables: what turns raw times into statements. Pure."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

Rounds = Sequence[float]


@dataclasses.dataclass(frozen=True)
class Ratio:
    """How one contender's times relate to another's, round by round.

    Attributes:
        median: of the rounds' ratios.
        low: their first quartile.
        high: their third quartile.
        undisturbed: ratio of the least times, which other processes disturbed least; from one round each.
        target: the median shall not exceed it; None for a ratio without a target.
    """

    median: float
    low: float
    high: float
    undisturbed: float
    target: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without one."""
        return None if self.target is None else self.median <= self.target


def compare(times: Rounds, reference: Rounds, *, target: float | None = None) -> Ratio:
    """Ratio of times to the reference's times of the same rounds.

    Dividing round by round, and not median by median, cancels what slowed a whole round down.

    Args:
        times: seconds of each round.
        reference: seconds of the same rounds.
        target: what the median of the ratios shall not exceed.

    Raises:
        ValueError: no rounds, or not the same number.

    Example:
        >>> compare([2.0, 2.2, 9.0], [1.0, 1.1, 3.0]).median
        2.0
    """
    if not times or len(times) != len(reference):
        raise ValueError(
            f"Ratios need the same rounds of both contenders, at least one; received {len(times)} and "
            f"{len(reference)} rounds."
        )
    ratios = [time / other for time, other in zip(times, reference, strict=True)]
    low, high = quartiles(ratios)
    return Ratio(statistics.median(ratios), low, high, min(times) / min(reference), target)


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """First and third quartile; of a single value, that value twice.

    Example:
        >>> quartiles([1.0, 2.0, 3.0, 4.0, 5.0])
        (2.0, 4.0)
    """
    if len(values) == 1:
        return values[0], values[0]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third


def bus_bandwidth(size: int, *, ranks: int, seconds: float) -> float:
    """Bytes a second that each rank of a ring all-reduce sends: 2(N-1)/N·K over the time.

    The number compares across N: it is the speed of the slowest link when nothing else costs time.

    Args:
        size: K, bytes of the tensor.
        ranks: N.
        seconds: time of one all-reduce.

    Example:
        >>> bus_bandwidth(1000, ranks=4, seconds=1.0)
        1500.0
    """
    return 2 * (ranks - 1) / ranks * size / seconds


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns: the first to the left, the others to the right.

    Example:
        >>> print(table(["", "ms"], [["a", "1.0"], ["bc", "12.5"]]))
        |    |   ms |
        | -- | ---: |
        | a  |  1.0 |
        | bc | 12.5 |
    """
    columns = list(zip(head, *rows, strict=True))
    widths = [max(2, *(len(cell) for cell in column)) for column in columns]

    def line(cells: Sequence[str]) -> str:
        first, *others = zip(cells, widths, strict=True)
        aligned = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
        return f"| {' | '.join(aligned)} |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([line(head), line(rule), *(line(row) for row in rows)])


def ratio_table(ratios: Mapping[str, Ratio], processor: Mapping[str, Ratio]) -> str:
    """Ratios with their spread, targets and verdicts as a Markdown table.

    Args:
        ratios: of the times, which the targets are about.
        processor: the same of the processor's times, which other processes hardly disturb.
    """
    rows = []
    for what, ratio in ratios.items():
        target = "" if ratio.target is None else f"<= {ratio.target:.2f}"
        verdict = {None: "", True: "met", False: "missed"}[ratio.met]
        spread = f"{ratio.low:.3f} to {ratio.high:.3f}"
        others = [f"{ratio.undisturbed:.3f}", f"{processor[what].median:.3f}"]
        rows.append([what, f"{ratio.median:.3f}", spread, *others, target, verdict])
    return table(
        ["time of / time of", "ratio", "quartiles", "of the least", "of CPU time", "target", ""], rows
    )


def describe_size(size: int) -> str:
    """Bytes in the largest binary unit that divides them.

    Example:
        >>> describe_size(1024), describe_size(256 << 20), describe_size(1000)
        ('1 KB', '256 MB', '1000 B')
    """
    for power, unit in ((30, "GB"), (20, "MB"), (10, "KB")):
        if size and size % (1 << power) == 0:
            return f"{size >> power} {unit}"
    return f"{size} B"


def parse_size(text: str) -> int:
    """Inverse of `describe_size`; spaces don't matter.

    Raises:
        ValueError: no size, or not positive.

    Example:
        >>> parse_size("4KB"), parse_size("256 MB")
        (4096, 268435456)
    """
    words = text.strip().upper()
    for unit, power in (("KB", 10), ("MB", 20), ("GB", 30), ("B", 0)):
        if words.endswith(unit):
            words, factor = words.removesuffix(unit), 1 << power
            break
    else:
        factor = 1
    size = int(words) * factor
    if size < 4:
        raise ValueError(f"A size must hold at least one float32, 4 bytes; received {text!r}.")
    return size
