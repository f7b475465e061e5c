"""Ratios, bandwidths, sizes and tables."""

from __future__ import annotations

import pytest

from tfdist.bench.figures import (
    bus_bandwidth,
    compare,
    describe_size,
    parse_size,
    quartiles,
    ratio_table,
    table,
)


def test_ratio_is_the_median_of_the_rounds() -> None:
    # The machine was three times as slow in the last round, for both: the ratio doesn't notice.
    ratio = compare([1.0, 1.2, 3.3], [1.0, 1.0, 3.0])
    assert ratio.median == pytest.approx(1.1)
    assert ratio.undisturbed == 1.0
    assert (ratio.low, ratio.high) == pytest.approx((1.05, 1.15))


@pytest.mark.parametrize(("target", "met"), [(None, None), (1.0, False), (1.5, True), (2.0, True)])
def test_target_holds_for_the_median(target: float | None, met: bool | None) -> None:
    assert compare([1.5, 1.0, 4.0], [1.0, 1.0, 1.0], target=target).met is met


@pytest.mark.parametrize(("times", "reference"), [([], []), ([1.0], [1.0, 2.0]), ([1.0, 2.0], [1.0])])
def test_ratio_needs_the_same_rounds(times: list[float], reference: list[float]) -> None:
    with pytest.raises(ValueError, match=rf"received {len(times)} and {len(reference)} rounds"):
        compare(times, reference)


def test_quartiles_of_one_value() -> None:
    assert quartiles([2.0]) == (2.0, 2.0)


@pytest.mark.parametrize(("ranks", "factor"), [(2, 1.0), (3, 4 / 3), (4, 1.5)])
def test_bus_bandwidth_counts_what_a_rank_of_a_ring_sends(ranks: int, factor: float) -> None:
    assert bus_bandwidth(1 << 20, ranks=ranks, seconds=0.5) == pytest.approx(factor * (1 << 21))


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (4, "4 B"),
        (1000, "1000 B"),
        (1 << 10, "1 KB"),
        (3 << 19, "1536 KB"),
        (256 << 20, "256 MB"),
        (2 << 30, "2 GB"),
    ],
)
def test_sizes_read_back(size: int, text: str) -> None:
    assert describe_size(size) == text
    assert parse_size(text) == size
    assert parse_size(text.lower().replace(" ", "")) == size


@pytest.mark.parametrize("text", ["", "KB", "1.5MB", "0", "-4KB", "3", "4TB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - int() says what it could not read
        parse_size(text)


def test_table_is_markdown_with_aligned_columns() -> None:
    lines = table(["", "ms", "target"], [["first", "1.0", ""], ["x", "12.25", "<= 3"]]).splitlines()
    assert lines == [
        "|       |    ms | target |",
        "| ----- | ----: | -----: |",
        "| first |   1.0 |        |",
        "| x     | 12.25 |   <= 3 |",
    ]


def test_table_refuses_ragged_rows() -> None:
    with pytest.raises(ValueError, match="zip"):
        table(["a", "b"], [["only one"]])


def test_ratio_table_gives_verdicts() -> None:
    ratios = {
        "good": compare([1.0], [1.0], target=1.03),
        "bad": compare([1.1], [1.0], target=1.03),
        "free": compare([9.0], [1.0]),
    }
    processor = {name: compare([2.0], [1.0]) for name in ratios}
    rows = ratio_table(ratios, processor).splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [(row[0], row[1], *row[4:]) for row in cells] == [
        ("good", "1.000", "2.000", "<= 1.03", "met"),
        ("bad", "1.100", "2.000", "<= 1.03", "missed"),
        ("free", "9.000", "2.000", "", ""),
    ]
