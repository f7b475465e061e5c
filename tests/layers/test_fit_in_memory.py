"""`fit_in_memory`: trials in processes of their own. Also amounts of memory as text."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from tests.source_tree import search_path
from tfdist.layers import fit_in_memory, memory_search
from tfdist.layers.memory_sizes import bytes_of_text, text_of_bytes

ROWS, UNITS, DEPTH = 16384, 128, 40
LAYER = ROWS * UNITS * 4  # bytes of one layer's activations


class Tanh(layers.Layer):
    """The test's own, which the trial must find."""

    def call(self, x: Any) -> Any:
        return keras.ops.tanh(x)


def deep() -> Any:
    """All activations and hardly any computing."""
    hidden = [Tanh() for _ in range(DEPTH)]
    model = keras.Sequential([keras.Input((UNITS,)), layers.Dense(UNITS), *hidden, layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    return model


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([search_path(), str(Path(__file__).parents[2])]))


def test_recomputes_when_it_must(capfd: pytest.CaptureFixture[str]) -> None:
    """Plain training keeps the activations of all layers; there is room for half of them."""
    model = deep()
    batch = np.ones((ROWS, UNITS), "float32"), np.ones((ROWS, 1), "float32")
    before = model.get_weights()
    assert fit_in_memory(model, batch, 22 * LAYER) is model
    said = capfd.readouterr().out
    assert "fit_in_memory: training with recomputed blocks" in said, said
    for weight, was in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, was)
    model.train_on_batch(batch[0][:64], batch[1][:64])


def test_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = np.ones((2, UNITS), "float32"), np.ones((2, 1), "float32")
    monkeypatch.setattr(memory_search, "_try", lambda *_: None)
    with pytest.raises(
        ValueError, match=r"(?s)within 1.0 MB.*tried: plain.*recomputed blocks and 4 slices\. "
    ):
        fit_in_memory(deep(), batch, "1MB", most_steps=4)
    with pytest.raises(ValueError, match=r"takes a compiled and built model"):
        fit_in_memory(keras.Sequential([layers.Dense(1)]), batch, "1GB")


@pytest.mark.parametrize(
    ("text", "size"), [("4GB", 4 * 10**9), ("1.5 mb", 1_500_000), ("2MiB", 2**21), (17, 17), ("17", 17)]
)
def test_amounts(text: str | int, size: int) -> None:
    assert bytes_of_text(text) == size


@pytest.mark.parametrize("text", ["", "much", "-1GB", "4TB", "4IB"])
def test_what_is_no_amount(text: str) -> None:
    with pytest.raises(ValueError, match="number of bytes"):
        bytes_of_text(text)


def test_amounts_as_text() -> None:
    assert [text_of_bytes(size) for size in (1_230, 1_230_000, 1_230_000_000)] == [
        "1.2 KB",
        "1.2 MB",
        "1.2 GB",
    ]
