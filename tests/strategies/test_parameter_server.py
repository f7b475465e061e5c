"""The synchronous parameter server equals one process: with one server, and with several."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed import bodies, fitting, training
from tests.distributed.equivalence import OPTIMIZERS, assert_equivalent, available
from tests.strategies import saving_ranks, server_ranks
from tests.worlds import World, in_one_process, on, thorough
from tfdist import cost

WORLDS = on(("horovod", 2), ("tf", 4))
FEW = on(("horovod", 2), thorough=(("tf", 4),))
LINK = cost.Link(latency=0.0, bandwidth=1e9)
# One server at two ranks; at four two servers, and two ranks that keep nothing.
SERVERS = {2: 1, 4: 2}


def strategy_of(world: World) -> str:
    return f"parameter_server(servers={SERVERS[world.size]})"


# Those whose state is more than slots shaped like the weights.
PECULIAR = ("SGD", "Adafactor", "Nadam", "Muon", "ScheduleFreeAdamW", "MultiOptimizer")


@on(("horovod", 2))
@pytest.mark.parametrize(
    "optimizer",
    [*PECULIAR, *thorough(*(name for name in OPTIMIZERS if name not in PECULIAR))],
)
def test_every_optimizer(world: World, optimizer: str) -> None:
    if not available(optimizer):
        pytest.skip(f"this Keras has no {optimizer}")
    assert_equivalent(
        world, "dense", optimizer, OPTIMIZERS[optimizer], strategy="parameter_server(servers=2)"
    )


OPTIONS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "SGD": ("dense", "SGD", {"config": {"learning_rate": 0.1, "momentum": 0.9}}),
    "several optimizers": ("dense", "MultiOptimizer", {}),
    "Adafactor": ("convolution", "Adafactor", {}),
    "run_eagerly": ("dense", "Adam", {"compile_options": {"run_eagerly": True}}),
    "steps_per_execution": ("dense", "Adam", {"compile_options": {"steps_per_execution": 3}}),
    "xla": ("dense", "Adam", {"compile_options": {"jit_compile": True}}),
    "clipnorm": ("dense", "Adam", {"config": {"clipnorm": 0.02}}),
    "global_clipnorm": ("transformer", "AdamW", {"config": {"global_clipnorm": 0.02}}),
    "ema": ("dense", "Adam", {"config": {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2}}),
    "ema at the end": ("dense", "Adam", {"config": {"use_ema": True, "ema_momentum": 0.5}}),
    "keras_accumulation": (
        "dense", "Adam", {"config": {"gradient_accumulation_steps": 2, "global_clipnorm": 0.02}},
    ),
    "frozen_layer": ("dense", "Adam", {"freeze": 1}),
    "small messages": ("dense", "Adam", {"wrap_options": {"bucket_bytes": 1}}),
    "predivide": ("dense", "Adam", {"wrap_options": {"gradient_predivide_factor": 2.0}}),
    "passes": ("dense", "Adam", {"passes": 2, "config": {"global_clipnorm": 0.02}}),
    "embedding": ("embedding", "Adam", {}),
    "embedding, clipped": ("embedding", "Adam", {"config": {"global_clipnorm": 0.02}}),
}  # fmt: skip


# Where owners need what no owner has alone, or what is sent differs.
TELLING = (
    "several optimizers", "xla", "global_clipnorm", "ema", "passes", "keras_accumulation", "embedding, clipped",
)  # fmt: skip


@FEW
@pytest.mark.parametrize("option", [*TELLING, *thorough(*(each for each in OPTIONS if each not in TELLING))])
def test_options(world: World, option: str) -> None:
    kind, optimizer, options = OPTIONS[option]
    if not available(optimizer):
        pytest.skip(f"this Keras has no {optimizer}")
    options = dict(options)
    assert_equivalent(
        world, kind, optimizer, options.pop("config", {}), strategy=strategy_of(world), **options
    )


@on(("horovod", 2), ("tf", 4), thorough=(("tf", 2), ("horovod", 4)))
@pytest.mark.parametrize("servers", ["one", "all"])
def test_everywhere(world: World, servers: str) -> None:
    """Both ends of the range at every size on both engines, clipped by the norm of all gradients."""
    strategy = f"parameter_server(servers={1 if servers == 'one' else world.size})"
    assert_equivalent(world, "dense", "AdamW", {"global_clipnorm": 0.02}, strategy=strategy)


@FEW
@pytest.mark.parametrize("compression", ["fp16", "bf16"])
def test_compression_is_close(world: World, compression: str) -> None:
    options = {"wrap_options": {"compression": compression}, "strategy": strategy_of(world)}
    assert_equivalent(world, "dense", "SGD", {"learning_rate": 0.1}, tolerance=2e-3, **options)


@FEW
def test_mixed_precision(world: World) -> None:
    options = {"policy": "mixed_float16", "strategy": strategy_of(world)}
    assert_equivalent(world, "dense", "SGD", {"learning_rate": 0.1}, tolerance=2e-3, **options)


@FEW
@pytest.mark.parametrize("order", ["loss scale outside", "loss scale inside"])
def test_overflow_of_one_rank_skips_the_step_on_all(world: World, order: str) -> None:
    results = world.call(bodies.call_under, strategy_of(world), "training:overflow_on_one_rank", [order])
    ring = world.call(training.overflow_on_one_rank, order)
    assert [result["history"] for result in results] == [result["history"] for result in ring]


def assert_same_training(world: World, function: str, *args: Any) -> None:
    module = {"fitting": fitting, "training": training}[function.split(":")[0]]
    expected = in_one_process(getattr(module, function.split(":")[1]), *args)
    results = world.call(bodies.call_under, strategy_of(world), function, list(args))
    assert len({result["digest"] for result in results}) == 1, "ranks differ"
    assert {result["iterations"] for result in results} == {expected["iterations"]}
    assert max(results[0]["moved"]) > 1e-4
    for actual, wanted in zip(results[0]["weights"], expected["weights"], strict=True):
        np.testing.assert_allclose(actual, wanted, atol=1e-5, rtol=1e-5)


@FEW
@pytest.mark.parametrize("kind", ["apply", "apply_gradients", "apply eager"])
def test_custom_loop(world: World, kind: str) -> None:
    assert_same_training(world, "training:custom_loop", kind)


@WORLDS
def test_unequal_data(world: World) -> None:
    plan = "fewer batches" if world.size == 2 else "ragged"
    expected = in_one_process(fitting.uneven, plan, world.size, True, {})
    results = world.call(
        bodies.call_under, strategy_of(world), "fitting:uneven", [plan, world.size, False, {}]
    )
    assert len({result["digest"] for result in results}) == 1, "ranks differ"
    assert {result["iterations"] for result in results} == {expected["iterations"]}
    for actual, wanted in zip(results[0]["weights"], expected["weights"], strict=True):
        np.testing.assert_allclose(actual, wanted, atol=1e-5, rtol=1e-5)


@on(("horovod", 2))
def test_a_rank_stops_and_all_stop(world: World) -> None:
    assert_same_training(world, "fitting:stopping", "batch", {})


@on(("horovod", 2))
def test_a_rank_fails_and_all_train_again(world: World) -> None:
    said = world.call(bodies.call_under, strategy_of(world), "fitting:failing", [{}])
    for place in fitting.FAILURES:
        assert said[1][place] == ("ValueError", f"raised in {place}") or place == "data"
        assert said[0][place][0] == "PeerFailedError", (place, said[0][place])
        assert said[0][f"{place}, then"] == said[1][f"{place}, then"]


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
@on(("horovod", 2), ("tf", 4))
def test_files_are_those_of_one_process(world: World, policy: str, tmp_path: Path) -> None:
    """Each kind of save, read by plain Keras; a backup resumes; all ranks read what one wrote, and train on."""
    strategy = "parameter_server(servers=2)"
    tolerance = 1e-5 if policy == "float32" else 2e-3
    alone = str(tmp_path / "alone")
    expected = in_one_process(server_ranks.trained, "ring", alone, policy, 3)
    results = world.call(server_ranks.trained, strategy, str(tmp_path / "all"), policy, 2)
    assert {result["epochs"] for result in results} == {2}
    results = world.call(server_ranks.trained, strategy, str(tmp_path / "all"), policy, 3)
    assert {result["epochs"] for result in results} == {1}, "the backup of two epochs is there"
    assert len({result["digest"] for result in results}) == 1
    for result in results:
        assert result["iterations"] == expected["iterations"]
        for name in ("last", "best", "by_hand"):
            for actual, wanted in zip(result[name], expected[name], strict=True):
                np.testing.assert_allclose(actual, wanted, atol=tolerance, rtol=1e-4, err_msg=name)
        again = [*result["weights"], *result["loaded again"]]
        for actual, wanted in zip(again, result["last"], strict=True):
            if actual is not None:
                np.testing.assert_array_equal(actual, wanted)
        on = result["trained on"]
        assert on["digest"] == results[0]["trained on"]["digest"]
        # Plain Keras loses the state of an optimizer that scales the loss.
        assert on["iterations"] == expected["trained on"]["iterations"] > 0
        for actual, wanted in zip(on["weights"], expected["trained on"]["weights"], strict=True):
            np.testing.assert_allclose(actual, wanted, atol=tolerance, rtol=1e-4)


@on(("horovod", 2), ("tf", 3), ("tf", 4))
def test_dedicated_servers(world: World) -> None:
    servers = {2: 1, 3: 1, 4: 2}[world.size]
    strategy = f"parameter_server(servers={servers}, dedicated=True)"
    expected = in_one_process(server_ranks.with_dedicated_servers, "ring", 24)
    results = world.call(server_ranks.with_dedicated_servers, strategy, 24)
    assert {result["replicas"] for result in results} == {world.size - servers}
    assert len({result["digest"] for result in results}) == 1, "ranks differ"
    for result in results:
        assert result["iterations"] == expected["iterations"]
        for name, values in {**expected["history"], **expected["evaluated"]}.items():
            actual = {**result["history"], **result["evaluated"]}[name]
            np.testing.assert_allclose(actual, values, rtol=1e-5, atol=1e-6, err_msg=name)
        for actual, wanted in zip(result["weights"], expected["weights"], strict=True):
            np.testing.assert_allclose(actual, wanted, atol=1e-5, rtol=0)
    assert max(results[0]["moved"]) > 1e-4


@on(("tf", 4))
def test_slots_are_kept_once(world: World) -> None:
    everything = 2 * 4 * (4 * 256 * 256 + 4 * 256)
    for servers in (1, 4):
        kept = world.call(server_ranks.slot_bytes, f"parameter_server(servers={servers})")
        assert sum(mine for mine, _ in kept) == everything
        assert max(mine for mine, _ in kept) == everything / servers
        assert max(total - mine for mine, total in kept) < 1000, "stand-ins are small"


@on(("tf", 2), ("tf", 4), ("horovod", 4))
@pytest.mark.parametrize("kilobytes", [1024, 8192])
def test_bytes(world: World, kilobytes: int) -> None:
    """Those of the model on paper, and at servers=1 of every rank."""
    size, payload = world.size, kilobytes * 1024
    assert cost.parameter_server(size, payload, LINK).sent == (size - 1) * payload
    one = world.call(server_ranks.bytes_of_a_step, "parameter_server(servers=1)", kilobytes)
    assert one == [
        pytest.approx((size - 1) * payload, rel=0.03),
        *[pytest.approx(payload, rel=0.03)] * (size - 1),
    ]
    all_ = world.call(server_ranks.bytes_of_a_step, f"parameter_server(servers={size})", kilobytes)
    expected = cost.parameter_server(size, payload, LINK, servers=size).sent
    assert all_ == [pytest.approx(expected, rel=0.03)] * size


@on(("horovod", 2))
def test_what_is_refused(world: World) -> None:
    for adasum, local in world.call(server_ranks.refusals, "parameter_server"):
        assert "Adasum combines whole gradients" in adasum
        assert "no variable can be local" in local


@WORLDS
def test_a_rank_fails_while_the_others_save(world: World, tmp_path: Path) -> None:
    """They wait where it does not come, and it tells them; the folder of the checkpoint is new on all ranks."""
    strategy = f"parameter_server(servers={world.size})"
    *others, failed = world.call(saving_ranks.failing_before_a_save, strategy, str(tmp_path))
    assert failed[:2] == ("ValueError", "my callback broke")
    for kind, text, seconds, digest in others:
        assert kind == "PeerFailedError"
        assert "ValueError: my callback broke" in text
        assert seconds < 40, "within the bound of the world it would be 60"
        assert digest == failed[3]


def test_a_lone_save_is_an_error(fresh_world: Callable[..., World], tmp_path: Path) -> None:
    world = fresh_world("tf", 2, timeout=5.0)
    first, second = world.outcomes(
        server_ranks.save_alone, "parameter_server(servers=2)", str(tmp_path / "x.keras")
    )
    assert first.kind == "CollectiveTimeoutError"
    assert "saving the optimizer's state" in str(first.error)
    assert second.value == "saved"
