"""`SyncBatchNormalization` on N ranks equals plain BatchNormalization of one process with the ranks' batches."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

import tfdist
from tests.layers import ranks
from tests.worlds import World, in_one_process, on

WORLDS = on(("horovod", 2), ("tf", 4))
PAIRS = on(("horovod", 2), thorough=(("tf", 2),))
EPSILON = {"float16": 2.0**-10, "bfloat16": 2.0**-7}


alone = functools.cache(in_one_process)


def assert_as_one_process(
    results: list[dict[str, Any]], expected: dict[str, Any], tolerance: float = 1e-5
) -> None:
    assert len({result["digest"] for result in results}) == 1, "ranks differ, moving statistics included"
    assert results[0]["iterations"] == expected["iterations"] > 0
    assert min(results[0]["moved"]) > 1e-4, "every weight and moving statistic moves"
    for key in ("weights", "slots"):
        for actual, wanted in zip(results[0][key], expected[key], strict=True):
            np.testing.assert_allclose(actual, wanted, atol=tolerance, rtol=tolerance)


@WORLDS
def test_layer_by_hand(world: World) -> None:
    """Outputs, gradients and moving statistics, with unequal batches, one of them empty at four ranks."""
    expected = alone(ranks.all_layer_cases)
    results = world.call(ranks.all_layer_cases)
    for case, wanted in expected.items():
        tolerance = EPSILON.get(case, 1e-5)
        for name, value in wanted.items():
            if case == "far from zero" and not name.startswith("moving"):
                continue  # TensorFlow's x·scale - mean·scale loses digits there
            parts = [result[case][name] for result in results]
            if name in ("outputs", "of inputs"):
                actual = np.concatenate(parts)
            else:
                actual = parts[0]
                assert all(np.array_equal(part, actual) for part in parts), f"ranks differ: {case}, {name}"
            # A weight's gradient sums 56 terms, rounded to the input's dtype on the way.
            scale = max(1.0, float(np.abs(value).max()))
            np.testing.assert_allclose(actual, value, atol=tolerance * scale, err_msg=f"{case}, {name}")
    distance = np.abs(expected["plain"]["outputs"] - expected["masked"]["outputs"]).max()
    assert distance > 0.01, "masks matter"


@WORLDS
def test_fit(world: World) -> None:
    optimizer = "Adam" if world.size == 2 else "SGD"
    expected = alone(ranks.fit_images, optimizer)
    results = world.call(ranks.fit_images, optimizer)
    assert_as_one_process(results, expected)
    np.testing.assert_allclose(results[0]["evaluated"], expected["evaluated"], atol=1e-5)
    np.testing.assert_allclose(results[0]["predicted"], expected["predicted"], atol=1e-5)


@PAIRS
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_mixed_precision(world: World, dtype: str) -> None:
    expected = alone(ranks.fit_images, "SGD", f"mixed_{dtype}")
    results = world.call(ranks.fit_images, "SGD", f"mixed_{dtype}")
    assert_as_one_process(results, expected, EPSILON[dtype])


@PAIRS
@pytest.mark.parametrize("plan", list(ranks.PLANS))
def test_uneven_data(world: World, plan: str) -> None:
    assert_uneven_as_one_process(world, plan, "known length")


@on(("tf", 2))
@pytest.mark.parametrize("mode", [mode for mode in ranks.MODES if mode != "known length"])
def test_uneven_data_in_other_ways(world: World, mode: str) -> None:
    assert_uneven_as_one_process(world, "fewer batches", mode)


def assert_uneven_as_one_process(world: World, plan: str, mode: str) -> None:
    expected = alone(ranks.fit_uneven, plan, "known length")
    results = world.call(ranks.fit_uneven, plan, mode)
    assert_as_one_process(results, expected)
    for name, values in expected["logs"].items():
        np.testing.assert_allclose(results[0]["logs"][name], values, atol=1e-5, err_msg=name)


@PAIRS
def test_a_step_that_updates_nothing_leaves_moving_statistics(world: World) -> None:
    assert_as_one_process(world.call(ranks.fit_until_one_rank_stops), alone(ranks.fit_until_one_rank_stops))


@on(("tf", 4), ("horovod", 4))
def test_process_sets(world: World) -> None:
    results = world.call(ranks.fit_in_a_process_set, False)
    for backwards in (False, True):
        assert_as_one_process(results[int(backwards) :: 2], alone(ranks.fit_in_a_process_set, backwards))


@on(("tf", 2))
def test_frozen_it_sends_nothing(world: World) -> None:
    for outputs, moving_mean in world.call(ranks.fit_frozen):
        np.testing.assert_allclose(outputs, 3.0 / np.sqrt(1.001), rtol=1e-6)
        np.testing.assert_array_equal(moving_mean, 0.0)


@on(("single", 1), ("tf", 2))
def test_xla_is_left_off_on_several_ranks(world: World) -> None:
    for result in world.call(ranks.xla):
        assert result["plain"]
        assert result["synchronized"] == (world.size == 1)
        assert ("can't be compiled by XLA" in result["said"]) == (world.size > 1)


@on(("tf", 2))
def test_converted_after_compiling_for_xla(world: World) -> None:
    assert_as_one_process(world.call(ranks.fit_with_xla), alone(ranks.fit_with_xla))


def test_alone_it_is_batch_normalization() -> None:
    """Bit for bit, before `init` and in a world of one rank."""
    import keras

    from tfdist.layers import SyncBatchNormalization

    x = np.random.default_rng(0).standard_normal((5, 3)).astype("float32")
    plain, ours = keras.layers.BatchNormalization(), SyncBatchNormalization()
    for _ in range(2):
        np.testing.assert_array_equal(plain(x, training=True), ours(x, training=True))
        tfdist.init()
    tfdist.shutdown()
    for wanted, actual in zip(plain.variables, ours.variables, strict=True):
        np.testing.assert_array_equal(actual, wanted)


def test_process_set_must_be_one() -> None:
    with pytest.raises(TypeError, match=r"add_process_set.*received \[0, 1\]"):
        tfdist.layers.SyncBatchNormalization(process_set=[0, 1])


@on(("tf", 2))
def test_in_local_it_asks_nobody(world: World) -> None:
    actual, _ = world.call(ranks.fit_alone)
    for one, wanted in zip(actual, alone(ranks.fit_alone), strict=True):
        np.testing.assert_allclose(one, wanted, atol=1e-6)
