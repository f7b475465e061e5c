"""`auto`: the choice on paper, and that what it chooses trains."""

from __future__ import annotations

import doctest
from typing import Any

import numpy as np
import pytest

import tfdist
from tests.distributed import bodies, models
from tests.worlds import World, in_one_process, on
from tfdist import cost, resources
from tfdist.strategies import auto

GB = 10**9
LINK = cost.Link(latency=1e-4, bandwidth=1e9)


def circumstances(free: list[int], **changes: Any) -> auto.Circumstances:
    return auto.Circumstances(
        **{"ranks": 4, "payload": GB, "slots": 2.0, "link": LINK, "free": free, **changes}
    )


def test_examples() -> None:
    assert doctest.testmod(auto).failed == 0


@pytest.mark.parametrize(
    ("free", "chosen"),
    [
        ([100 * GB] * 4, "ring"),  # gradients and slots: 3 GB
        ([0] * 4, "ring"),  # unknown
        ([6 * GB] * 4, "ring"),
        ([5 * GB] * 4, "parameter_server(servers=4)"),  # 1 of gradients, 3/4 of those that come, 1/2 of slots
        ([100 * GB, 5 * GB, 5 * GB, 5 * GB], "parameter_server(servers=4)"),
        ([100 * GB, 3 * GB, 3 * GB, 3 * GB], "parameter_server(servers=1)"),  # only the first has room
        ([1 * GB] * 4, "parameter_server(servers=4)"),  # none fits
    ],
)
def test_the_fastest_that_fits(free: list[int], chosen: str) -> None:
    best, why = auto.choose(circumstances(free))
    assert best.name == chosen
    assert f"takes {chosen} for 953.7 MB of weights on 4 ranks" in why
    assert ("none fits" in why) == (max(free) == GB)
    assert "parameter_server(servers=1) 2,861.0 MB, 6000.6 ms, 5,722.0 MB" in why
    assert ("ring 1,430.5 MB, 1500.6 ms, 2,861.0 MB (too much)" in why) == (chosen != "ring")


def test_without_slots_nothing_is_saved_by_servers() -> None:
    assert auto.choose(circumstances([2 * GB] * 4, slots=0.0))[0].name == "ring"


def trained(free: int) -> dict[str, Any]:
    """Trains with so many bytes free on each rank; also what was printed."""
    import contextlib
    import io

    import keras

    keras.utils.set_random_seed(3)
    model = models.dense()
    x, y = models.data("dense")
    before, real = bodies.weights_of(model), resources.free_memory
    resources.free_memory = lambda: free * tfdist.local_size()
    printed = io.StringIO()
    try:
        with bodies.under("auto"), contextlib.redirect_stdout(printed):
            optimizer = bodies.wrap(keras.optimizers.Adam(0.01))
            model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
            batch = models.GLOBAL_BATCH // tfdist.size()
            model.fit(bodies.share(x), bodies.share(y), batch_size=batch, shuffle=False, verbose=0)
    finally:
        resources.free_memory = real
    return bodies.outcome(model, before) | {"printed": printed.getvalue()}


@on(("horovod", 2), ("tf", 4))
@pytest.mark.parametrize("free", [1 << 30, 3000])
def test_what_is_chosen_equals_one_process(world: World, free: int) -> None:
    expected = in_one_process(trained, free)
    results = world.call(trained, free)
    chosen = "ring" if free > 3000 else f"parameter_server(servers={world.size})"
    assert f"tfdist: strategy auto takes {chosen} for 0.0 MB" in results[0]["printed"]
    assert not any(result["printed"] for result in results[1:])
    assert any(each is None for each in results[0]["slots"]) == (chosen != "ring")
    assert len({result["digest"] for result in results}) == 1, "ranks differ"
    assert results[0]["iterations"] == expected["iterations"] > 0
    assert max(results[0]["moved"]) > 1e-4
    for actual, wanted in zip(results[0]["weights"], expected["weights"], strict=True):
        np.testing.assert_allclose(actual, wanted, atol=1e-5, rtol=0)


def only_in_a_ring(name: str) -> bool:
    """Wraps an optimizer that asks for what parameter servers refuse; whether state was divided."""
    import keras
    import tensorflow as tf

    with bodies.under("auto"):
        variable = tf.Variable([1.0])
        optimizer = tfdist.DistributedOptimizer(
            keras.optimizers.SGD(), op=tfdist.Adasum if name == "Adasum" else tfdist.Average
        )
        if name == "local variable":
            optimizer.register_local_var(variable)
        optimizer.build([variable])
    return bool(optimizer._self_strategy.divides_state)


@on(("horovod", 2))
@pytest.mark.parametrize("name", ["Adasum", "local variable"])
def test_what_only_a_ring_can(world: World, name: str) -> None:
    assert world.call(only_in_a_ring, name) == [False] * 2
