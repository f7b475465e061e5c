"""`recompute`: outputs, gradients, losses, state as of the undecorated layer, in every mode."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from tests.layers.recomputed import CASES, by_class, plain, training_steps
from tfdist.layers import recompute


@functools.cache
def undecorated(name: str, mode: str) -> list[np.ndarray]:
    return training_steps(CASES[name], plain, mode)


def assert_equal(actual: list[np.ndarray], wanted: list[np.ndarray], tolerance: float) -> None:
    assert len(actual) == len(wanted)
    for one, other in zip(actual, wanted, strict=True):
        if tolerance:
            np.testing.assert_allclose(
                one, other, rtol=tolerance, atol=tolerance * np.abs(other).max(initial=0.0)
            )
        else:
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", CASES)
def test_eager_bit_by_bit(name: str) -> None:
    assert_equal(training_steps(CASES[name], recompute, "eager"), undecorated(name, "eager"), 0.0)


@pytest.mark.parametrize("name", ["nested", "keyword arguments", "shared, and a weight of another layer"])
def test_class_eager_bit_by_bit(name: str) -> None:
    assert_equal(training_steps(CASES[name], by_class, "eager"), undecorated(name, "eager"), 0.0)


@pytest.mark.parametrize("name", CASES)
def test_graph(name: str) -> None:
    tolerance = {"mixed float16": 2.0**-10, "mixed bfloat16": 2.0**-7}.get(name, 1e-6)
    assert_equal(training_steps(CASES[name], recompute, "graph"), undecorated(name, "graph"), tolerance)
