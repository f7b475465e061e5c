"""Plans of real models: what is balanced, what stays together, what is printed, what is refused."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from tests.layers.test_recompute_model import branching, sequential
from tfdist.keras_compat.functional_graphs import graph_of
from tfdist.pipeline.pins import stage
from tfdist.pipeline.plan import Plan, make_plan
from tfdist.pipeline.schedule import gpipe


def plan_of(model: Any, stages: int, balance: Any = "parameters", rows: int = 4) -> Plan:
    return make_plan(graph_of(model), gpipe(stages, 4), balance, rows)


def dense(*sizes: int) -> Any:
    hidden = [layers.Dense(size, name=f"dense{i}") for i, size in enumerate(sizes)]
    return keras.Sequential([keras.Input((sizes[0],)), *hidden])


def test_parameters_are_balanced() -> None:
    plan = plan_of(dense(40, 8, 8, 8, 8), 2)
    assert [each.layers for each in plan.stages] == [("dense0",), ("dense1", "dense2", "dense3", "dense4")]
    assert [each.parameters for each in plan.stages] == [40 * 41, 8 * 41 + 3 * 8 * 9]
    assert plan.stages[0].sent == 4 * 40 * 4


def test_memory_counts_weights_and_activations() -> None:
    hidden = [layers.Dense(64), *(layers.Activation("tanh") for _ in range(3)), layers.Dense(64)]
    model = keras.Sequential([keras.Input((4,)), *hidden])
    assert plan_of(model, 2, "memory", 1).ends == (4, 5), "the weights of the last layer weigh most"
    plan = plan_of(model, 2, "memory", 100_000)
    assert plan.ends in ((2, 5), (3, 5)), "four activations of a size, and an output"
    assert all(each.activations >= 100_000 * 64 * 4 for each in plan.stages)


def test_time_is_measured_and_state_kept() -> None:
    model = sequential()
    before = [each.numpy() for each in model.variables]
    keras.utils.set_random_seed(1)
    plan = plan_of(model, 2, "time", 8)
    assert all(each.forward > 0 and each.backward > 0 for each in plan.stages)
    assert "by the measured times" in str(plan)
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


def test_the_slow_layer_has_a_stage_of_its_own() -> None:
    slow = [layers.Dense(4), layers.Dense(4), layers.Dense(3000), layers.Dense(3000), layers.Dense(4)]
    plan = plan_of(keras.Sequential([keras.Input((4,)), *slow]), 3, "time", 256)
    assert any(each.layers == (slow[3].name,) for each in plan.stages), str(plan)


def test_a_shared_layer_stays_on_one_stage() -> None:
    for stages in (2, 3, 4):
        plan = plan_of(branching(), stages)
        (shared,) = {name for each in plan.stages for name in each.layers if each.layers.count(name) == 2}
        assert sum(shared in each.layers for each in plan.stages) == 1


def test_pinned_layers_are_where_they_are_pinned() -> None:
    @stage(1)
    class Pinned(layers.Dense):
        pass

    model = keras.Sequential(
        [keras.Input((8,)), layers.Dense(8), Pinned(8), layers.Dense(8), layers.Dense(800)]
    )
    stage(1)(model.layers[3])
    plan = plan_of(model, 2)
    assert plan.ends == (1, 4)


def test_printed_plan() -> None:
    text = str(plan_of(dense(4, 4, 4), 2)).splitlines()
    assert text[0].split() == [
        "stage",
        "parameters",
        "activations",
        "sent",
        "on",
        "forward",
        "backward",
        "layers",
    ]
    assert text[1].split()[:4] == ["0", "20", *text[1].split()[2:4]]
    assert text[3] == "4 micro-batches; devices idle 20% of the time, for equal stages."
    assert text[4:] == gpipe(2, 4).draw().splitlines()


def test_given_cut() -> None:
    assert plan_of(dense(4, 4, 4, 4), 3, ["dense1", "dense3"]).ends == (1, 3, 4)


@pytest.mark.parametrize(
    ("balance", "message"),
    [
        ("speed", "`balance` is one of .* received 'speed'"),
        (["dense9"], r"received balance=\['dense9'\], of which \['dense9'\] are unknown"),
        (["dense1", "dense2"], "names the first layer of each stage but the first, 1 in the order"),
        (["dense0"], "names the first layer"),
    ],
)
def test_wrong_balance(balance: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_of(dense(4, 4, 4), 2, balance)


def test_a_cut_through_a_shared_layer_is_refused() -> None:
    shared = layers.Dense(4, name="shared")
    inputs = keras.Input((4,))
    model = keras.Model(inputs, shared(layers.ReLU(name="relu")(shared(inputs))))
    with pytest.raises(ValueError, match=r"share variables stay on one stage; received a cut .* at relu"):
        plan_of(model, 2, ["relu"])
    with pytest.raises(ValueError, match=r"at most 1 stages.*Take stages=1"):
        plan_of(model, 2)


def test_an_open_shape_is_refused() -> None:
    model = keras.Sequential([keras.Input((None, 4)), layers.Dense(4), layers.Dense(4)])
    with pytest.raises(ValueError, match=r"received an input .* of shape \(None, None, 4\)"):
        plan_of(model, 2)


@pytest.mark.parametrize("number", [-1, 1.5, True, "1"])
def test_no_stage_to_pin_to(number: Any) -> None:
    with pytest.raises(ValueError, match="A stage is a whole number from 0 on"):
        stage(number)


def test_only_layers_are_pinned() -> None:
    with pytest.raises(TypeError, match="pins a layer"):
        stage(0)(3)
