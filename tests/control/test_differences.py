from __future__ import annotations

import doctest

from tfdist.control import differences
from tfdist.control.diagnosis import explain_mismatch
from tfdist.control.differences import shorten_differing


def layers(count: int) -> list[str]:
    return [f"block_{number}/kernel: float32[64, 64]" for number in range(count)]


def listed(parts: list[str]) -> str:
    return "gradients of " + ", ".join(parts)


def blocks(text: str, *numbers: int) -> list[int]:
    """Those of `numbers` whose blocks are shown."""
    return [number for number in numbers if f"block_{number}/" in text]


def test_short_texts_stay_whole() -> None:
    texts = ["Sum float32[3]", "Max float32[3, 4]", "Sum int64[]"]
    assert shorten_differing(texts) == texts


def test_example() -> None:
    assert doctest.testmod(differences).failed == 0


def test_missing_part_is_shown_with_its_neighbours() -> None:
    parts = layers(300)
    whole, lacking = shorten_differing([listed(parts), listed(parts[:200] + parts[201:])])
    assert blocks(whole, *range(300)) == [0, 199, 200, 201]
    assert blocks(lacking, *range(300)) == [0, 199, 201]
    assert whole.startswith("gradients of block_0/")
    assert whole.endswith("(300 in all)")
    assert lacking.endswith("(299 in all)")
    assert len(whole) < 300


def test_a_shape_is_one_part() -> None:
    parts = layers(100)
    other = [*parts[:40], "block_40/kernel: float32[64, 65]", *parts[41:]]
    first, second = shorten_differing([listed(parts), listed(other)])
    assert "block_40/kernel: float32[64, 64], block_41/kernel: float32[64, 64], … 58 the same" in first
    assert "block_40/kernel: float32[64, 65], block_41" in second


def test_distant_differences_are_shown_without_what_lies_between() -> None:
    parts = layers(400)
    first, second = shorten_differing([listed(parts), listed(parts[1:350] + parts[351:399])])
    assert blocks(first, *range(400)) == [0, 1, 2, 349, 350, 351, 398, 399]
    assert blocks(second, *range(400)) == [1, 2, 349, 351, 398]
    assert second.startswith("gradients of block_1/")


def test_every_other_list_counts() -> None:
    parts = layers(100)
    texts = [listed(parts), listed(parts[:20] + parts[21:]), listed(parts[:70] + parts[71:])]
    first, second, third = shorten_differing(texts)
    assert blocks(first, 20, 70) == [20, 70]
    assert blocks(second, 20, 70) == []
    assert blocks(third, 20, 70) == []


def test_many_differences_are_cut_and_counted() -> None:
    parts = layers(100)
    other = [part.replace("float32", "float16") if number % 2 else part for number, part in enumerate(parts)]
    texts = shorten_differing([listed(parts), listed(other)])
    for text in texts:
        assert "of which 38 differ" in text
        assert len(text) < 1200


def test_thousands_of_equally_named_parts() -> None:
    # The best alignment of these would take hours.
    same = ["dense/bias: float32[8]"] * 20_000
    texts = shorten_differing([listed(same), listed(["x: int8[]", *same, "y: int8[]"])])
    assert max(map(len, texts)) < 1000


def test_mismatch_of_large_models_is_readable() -> None:
    parts = layers(500)
    text = explain_mismatch({0: listed(parts), 1: listed(parts[:-1]), 2: listed(parts)}, operation="step")
    assert "ranks 0, 2 sent gradients of block_0/" in text
    assert "block_499/kernel" in text
    assert len(text) < 700


def test_mismatch_shows_a_few_of_many_values() -> None:
    text = explain_mismatch({rank: f"float32[{rank}]" for rank in range(50)}, operation="sum")
    assert "rank 3 sent float32[3]" in text
    assert "and 46 other values" in text
    assert "float32[4]" not in text
