"""One loss of the whole batch: a contrastive loss on N ranks trains as on one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.strategies import served_loss_ranks
from tests.worlds import World, in_one_process, on

WORLDS = on(("horovod", 2), ("tf", 4))
SERVED = "parameter_server(server_loss=True)"


def assert_equals_one_process(
    world: World, kind: str, strategy: str, policy: str = "float32", tolerance: float = 1e-5
) -> list[dict[str, Any]]:
    expected = in_one_process(served_loss_ranks.trained, kind, "ring", policy)
    results = world.call(served_loss_ranks.trained, kind, strategy, policy)
    assert len({result["digest"] for result in results}) == 1, "ranks differ"
    assert {result["iterations"] for result in results} == {expected["iterations"]}
    assert max(results[0]["moved"]) > 1e-3
    for result in results:
        np.testing.assert_allclose(result["loss"], expected["loss"], rtol=max(1e-5, tolerance))
        for actual, wanted in zip(result["weights"], expected["weights"], strict=True):
            np.testing.assert_allclose(actual, wanted, atol=tolerance, rtol=0)
    return results


@WORLDS
@pytest.mark.parametrize("kind", ["plain", "two outputs", "weighted", "own", "eager", "xla"])
def test_equals_one_process(world: World, kind: str) -> None:
    assert_equals_one_process(world, kind, SERVED)


@WORLDS
def test_each_rank_alone_would_not(world: World) -> None:
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_equals_one_process(world, "plain", "parameter_server")


@on(("horovod", 2), ("tf", 2))
def test_unequal_data(world: World) -> None:
    """Smaller batches on a rank, and one fewer."""
    assert_equals_one_process(world, "uneven", SERVED)


@on(("horovod", 2))
def test_loss_scaling(world: World) -> None:
    assert_equals_one_process(world, "plain", SERVED, "mixed_float16", tolerance=5e-3)


@on(("tf", 3))
def test_a_server_that_computes_no_gradients(world: World) -> None:
    assert_equals_one_process(world, "plain", "parameter_server(dedicated=True, server_loss=True)")


@on(("horovod", 2))
def test_several_servers(world: World) -> None:
    assert_equals_one_process(world, "plain", "parameter_server(servers=2, server_loss=True)")


def test_weights_in_the_loss_are_refused(fresh_world: Callable[..., World]) -> None:
    for said in fresh_world("tf", 2).call(served_loss_ranks.refused, SERVED):
        assert "reads the weights 'dense" in said
        assert "Use them in the model's call" in said
