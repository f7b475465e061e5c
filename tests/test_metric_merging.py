"""Metrics of all ranks' data: the sum of states is the state of one process, whatever the metric."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.distributed import bodies, models
from tests.worlds import World, in_one_process, on
from tfdist.metric_merging import Measured, adds_up, measure, merge

WORLDS = on(("horovod", 2), ("tf", 4))
PAIRS = on(("horovod", 2), thorough=(("tf", 2),))


# Every metric that Keras ships.


def shipped() -> list[str]:
    """Names of Keras's metrics, each class once; the common base has no state."""
    classes = {
        value
        for value in vars(keras.metrics).values()
        if inspect.isclass(value) and issubclass(value, keras.metrics.Metric)
    }
    return sorted(each.__name__ for each in classes - {keras.metrics.Metric})


ARGUMENTS: dict[str, dict[str, Any]] = {
    "BinaryIoU": {"target_class_ids": [0, 1]},
    "IoU": {"num_classes": 3, "target_class_ids": [0, 2]},
    "MeanIoU": {"num_classes": 3},
    "OneHotIoU": {"num_classes": 3, "target_class_ids": [0, 2]},
    "OneHotMeanIoU": {"num_classes": 3},
    "MeanMetricWrapper": {"fn": keras.losses.mean_squared_error},
    "PrecisionAtRecall": {"recall": 0.5},
    "RecallAtPrecision": {"precision": 0.5},
    "SensitivityAtSpecificity": {"specificity": 0.5},
    "SpecificityAtSensitivity": {"sensitivity": 0.5},
    "SparseTopKCategoricalAccuracy": {"k": 2},
    "TopKCategoricalAccuracy": {"k": 2},
}
_INDICES = {"IoU", "MeanIoU", "Accuracy"}  # compare class numbers with class numbers
_SPARSE = {"SparseCategoricalAccuracy", "SparseCategoricalCrossentropy", "SparseTopKCategoricalAccuracy"}
_ONE_HOT = {
    "CategoricalAccuracy", "CategoricalCrossentropy", "CategoricalHinge", "F1Score", "FBetaScore", "KLDivergence",
    "OneHotIoU", "OneHotMeanIoU", "TopKCategoricalAccuracy",
}  # fmt: skip


def arguments_of_update(name: str, rows: int, seed: int) -> tuple[Any, ...]:
    draw = np.random.default_rng(seed)
    classes = draw.integers(0, 3, rows)
    probabilities = draw.dirichlet([1.0, 1.0, 1.0], rows).astype("float32")
    if name in ("Mean", "Sum"):
        return (draw.normal(size=rows).astype("float32"),)
    if name in _INDICES:
        return classes, draw.integers(0, 3, rows)
    if name in _SPARSE:
        return classes, probabilities
    if name in _ONE_HOT:
        return np.eye(3, dtype="float32")[classes], probabilities
    if name in ("R2Score", "PearsonCorrelation", "ConcordanceCorrelation", "CosineSimilarity"):
        return draw.normal(size=(rows, 3)).astype("float32"), draw.normal(size=(rows, 3)).astype("float32")
    return draw.integers(0, 2, (rows, 1)).astype("float32"), draw.random((rows, 1)).astype("float32")


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("name", shipped())
def test_states_of_every_keras_metric_add_up(name: str, weighted: bool) -> None:
    make = functools.partial(getattr(keras.metrics, name), **ARGUMENTS.get(name, {}))
    parts = [arguments_of_update(name, rows, seed) for seed, rows in enumerate((40, 7, 19))]
    weights = [np.random.default_rng(9).random(len(part[0])).astype("float32") for part in parts]
    states = []
    for part, weight in zip(parts, weights, strict=True):
        metric = make()
        metric.update_state(*part, **({"sample_weight": weight} if weighted else {}))
        assert adds_up(metric)
        states.append([np.asarray(variable) for variable in metric.variables])
    whole = make()
    together = tuple(np.concatenate(column) for column in zip(*parts, strict=True))
    whole.update_state(*together, **({"sample_weight": np.concatenate(weights)} if weighted else {}))
    summed = make()
    summed.update_state(*parts[0])
    for variable, *values in zip(summed.variables, *states, strict=True):
        variable.assign(np.sum(values, axis=0))
    expected = np.asarray(whole.result())
    np.testing.assert_allclose(np.asarray(summed.result()), expected, rtol=1e-5, atol=1e-6)
    if name != "SparseTopKCategoricalAccuracy":  # a top-2 of 3 classes may happen to agree
        alone = [np.asarray(_result(make(), part)) for part in parts]
        assert any(not np.allclose(value, expected, rtol=1e-4) for value in alone), "the test can't fail"


def _result(metric: Any, part: tuple[Any, ...]) -> Any:
    metric.update_state(*part)
    return metric.result()


# Models: ranks are played by parts of the data, one after the other.


class OwnMean(keras.metrics.Metric):
    """Keeps its state under a name that says nothing."""

    def __init__(self, name: str = "own") -> None:
        super().__init__(name=name)
        self.first = self.add_variable((), "zeros", name="first")
        self.second = self.add_variable((), "zeros", name="second")

    def update_state(self, y: Any, predicted: Any, sample_weight: Any = None) -> None:
        self.first.assign(self.first + tf.reduce_sum(tf.abs(y)))
        self.second.assign(self.second + tf.reduce_sum(tf.square(predicted)))

    def result(self) -> Any:
        return self.first / self.second


class DeclaredMean(OwnMean):
    tfdist_state = "sum"


class Composite(keras.metrics.Metric):
    """F1 made of Keras's precision and recall, which hold all its state."""

    def __init__(self, name: str = "composite") -> None:
        super().__init__(name=name)
        self.precision, self.recall = keras.metrics.Precision(), keras.metrics.Recall()

    def update_state(self, y: Any, predicted: Any, sample_weight: Any = None) -> None:
        self.precision.update_state(y > 0.5, tf.sigmoid(predicted))
        self.recall.update_state(y > 0.5, tf.sigmoid(predicted))

    def result(self) -> Any:
        precision, recall = self.precision.result(), self.recall.result()
        return 2 * precision * recall / (precision + recall + 1e-7)


class ShareOfEach(DeclaredMean):
    def result(self) -> Any:
        return keras.ops.stack([self.first + 0.0, self.second + 1.0])


class SeveralResults(DeclaredMean):
    def result(self) -> Any:
        return {"several_first": self.first, "several_second": self.second}


def multi_output(**options: Any) -> Any:
    keras.utils.set_random_seed(3)
    inputs = keras.Input((4,))
    outputs = {name: keras.layers.Dense(1, name=name)(inputs) for name in ("left", "right")}
    model = keras.Model(inputs, outputs)
    model.compile(**options)
    return model


def single_output(cls: type = keras.Sequential, **options: Any) -> Any:
    keras.utils.set_random_seed(3)
    model = cls([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(**options)
    return model


def rows(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(count, 4)).astype("float32")
    return x, (x[:, :1] ** 2).astype("float32"), draw.random(count).astype("float32")


def evaluated(model: Any, x: Any, y: Any, weight: Any) -> Measured:
    if "left" in (getattr(model, "output_names", None) or ()):
        y = {"left": y, "right": -y}
        weight = {"left": weight, "right": weight}
    return measure(model, model.evaluate(x, y, sample_weight=weight, verbose=0, return_dict=True))


def part(data: tuple[Any, ...], chosen: slice) -> list[Any]:
    return [values[chosen] for values in data]


def nothing_seen(model: Any) -> Measured:
    """A rank without data: its metrics are built, and empty."""
    model.reset_metrics()
    return measure(model, {})


CASES: dict[str, Callable[[], Any]] = {
    "metrics as a list": lambda: single_output(
        loss="mse", metrics=["mae", keras.metrics.R2Score(), keras.metrics.RootMeanSquaredError()]
    ),
    "weighted metrics": lambda: single_output(loss="mse", metrics=["mae"], weighted_metrics=["mae", "mse"]),
    "the same metric twice": lambda: single_output(loss="mse", metrics=["mae", "mae", "mse"]),
    "loss and metrics as dicts": lambda: multi_output(
        loss={"left": "mse", "right": "mae"},
        loss_weights={"left": 1.0, "right": 0.5},
        metrics={"left": ["mae", keras.metrics.R2Score()], "right": "mse"},
        weighted_metrics={"right": ["mae"]},
    ),
    "one output has metrics": lambda: multi_output(
        loss={"left": "mse", "right": "mae"},
        metrics={"right": ["mse", keras.metrics.R2Score(name="left_r2")]},
    ),
    "declared": lambda: single_output(loss="mse", metrics=[DeclaredMean(), SeveralResults(name="several")]),
    "composite": lambda: single_output(loss="mse", metrics=[Composite()]),
    "results that are arrays": lambda: single_output(
        loss="mse",
        metrics=[keras.metrics.F1Score(threshold=0.1), ShareOfEach(name="share")],
    ),
    "step under other names": lambda: single_output(OtherNames, loss="mse"),
    "metrics combined by the model": lambda: single_output(Combining, loss="mse", metrics=["mae"]),
}


class OtherNames(keras.Sequential):
    """Returns results of its trackers under names of its own, as many published models do."""

    def __init__(self, layers: Any) -> None:
        super().__init__(layers)
        self.total, self.largest = keras.metrics.Mean(name="total_loss"), keras.metrics.Sum(name="all")

    @property
    def metrics(self) -> list[Any]:
        return [self.total, self.largest]

    def test_step(self, data: Any) -> Any:
        x, y, _ = data
        error = tf.square(y - self(x))
        self.total.update_state(error)
        self.largest.update_state(error)
        return {"loss": self.total.result(), "sum": self.largest.result()}


class Combining(keras.Sequential):
    def get_metrics_result(self) -> Any:
        results = super().get_metrics_result()
        return {**results, "product": results["mae"] * results["loss"]}

    def test_step(self, data: Any) -> Any:
        return {**super().test_step(data), "product": 0.0}


@pytest.mark.parametrize("case", CASES)
def test_unequal_ranks_and_an_empty_one_equal_one_process(case: str) -> None:
    data = rows(90)
    model = CASES[case]()
    whole = evaluated(model, *data)
    evaluated(model, *part(data, slice(0, 5)))
    empty = nothing_seen(model)
    ranks = [empty, *(evaluated(model, *part(data, chosen)) for chosen in (slice(0, 64), slice(64, 90)))]
    ranks = [Measured.from_payload(rank.to_payload()) for rank in ranks]
    merged, averaged = merge(model, ranks)
    assert averaged == []
    assert list(merged) == list(whole.logs)
    for name, value in whole.logs.items():
        np.testing.assert_allclose(merged[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
        assert not np.allclose(ranks[1].logs[name], value, rtol=1e-4), f"{name}: the test can't fail"


def test_other_metrics_are_means_weighted_by_samples_and_are_named() -> None:
    data = rows(90)
    metrics = [OwnMean(), keras.metrics.MeanAbsoluteError(name="not_own")]
    model = single_output(loss="mse", metrics=metrics)
    whole = evaluated(model, *data)
    ranks = [evaluated(model, *part(data, chosen)) for chosen in (slice(0, 64), slice(64, 90))]
    merged, averaged = merge(model, ranks)
    assert averaged == ["own"]
    expected = (ranks[0].logs["own"] * 64 + ranks[1].logs["own"] * 26) / 90
    assert merged["own"] == pytest.approx(expected)
    assert merged["not_own"] == pytest.approx(whole.logs["not_own"], rel=1e-5)


class OwnValues(keras.Sequential):
    """Its losses come from no metric, though the model has one of that name."""

    def test_step(self, data: Any) -> Any:
        return {"loss": tf.reduce_mean(tf.abs(self(data[0]))), "penalty": tf.reduce_max(data[1])}


def test_values_of_an_own_step_that_no_metric_produced_are_averaged() -> None:
    model = single_output(OwnValues, loss="mse")
    ranks = [evaluated(model, *rows(20, seed)) for seed in (1, 2)]
    merged, averaged = merge(model, [nothing_seen(model), *ranks])
    assert averaged == []
    for name in ("loss", "penalty"):
        assert merged[name] == pytest.approx((ranks[0].logs[name] + ranks[1].logs[name]) / 2)
    assert merged["loss"] > 0.1, "not the idle tracker of the same name"


def test_nan_of_a_rank_with_data_is_global_and_of_one_without_is_nothing() -> None:
    model = single_output(loss="mse", metrics=["mae"])
    x, y, weight = rows(20)
    good = evaluated(model, x, y, weight)
    bad = evaluated(model, x * np.nan, y, weight)
    empty = Measured({"loss": float("nan")}, nothing_seen(model).states, 0.0)
    assert np.isnan(merge(model, [good, bad])[0]["loss"])
    assert np.isnan(merge(model, [bad, good])[0]["mae"])
    merged, _ = merge(model, [empty, good])
    assert merged["mae"] == pytest.approx(good.logs["mae"])
    assert merged["loss"] == pytest.approx(good.logs["loss"])


def test_what_only_one_rank_has_or_has_in_another_shape_is_left_out() -> None:
    model = single_output(loss="mse")
    ranks = [
        Measured({"mine": 1.0, "both": 1.0, "rate": 0.1, "shape": [1.0, 2.0]}, [None], 10.0),
        Measured({"both": 4.0, "rate": 0.1, "shape": 3.0}, [None], 20.0),
    ]
    assert merge(model, ranks)[0] == {"both": pytest.approx(3.0), "rate": 0.1}
    assert merge(model, [Measured({}, [None], 0.0)] * 2)[0] == {}


# fit() of real ranks.


def every_kind_of_metric() -> Any:
    """A model with an output for each kind of metric."""
    keras.utils.set_random_seed(3)
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(6, "tanh")(inputs)
    outputs = {
        "yes": keras.layers.Dense(1, "sigmoid", name="yes")(hidden),
        "kind": keras.layers.Dense(3, "softmax", name="kind")(hidden),
        "size": keras.layers.Dense(1, name="size")(hidden),
    }
    model = keras.Model(inputs, outputs)
    model.compile(
        bodies.wrap(keras.optimizers.Adam(0.01)),
        {"yes": "binary_crossentropy", "kind": "categorical_crossentropy", "size": "mse"},
        metrics={
            "yes": [
                "accuracy",
                keras.metrics.AUC(name="auc"),
                keras.metrics.Precision(name="precision"),
                keras.metrics.Recall(name="recall"),
            ],
            "kind": [
                "accuracy",
                keras.metrics.MeanIoU(3, name="iou", sparse_y_true=False, sparse_y_pred=False),
                keras.metrics.F1Score(name="f1"),
                keras.metrics.F1Score(average="macro", name="macro"),
            ],
            "size": [keras.metrics.R2Score(name="r2"), keras.metrics.RootMeanSquaredError(name="rmse")],
        },
    )
    return model


def labelled(count: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    draw = np.random.default_rng(count)
    x = draw.normal(size=(count, 4)).astype("float32")
    kinds = np.argmax(x[:, :3] + draw.normal(size=(count, 3)), axis=1)
    yes = (x[:, :1] + 0.5 * draw.normal(size=(count, 1)) > 0.2).astype("float32")
    return x, {"yes": yes, "kind": np.eye(3, dtype="float32")[kinds], "size": x[:, 1:2] ** 2}


class Seen(keras.callbacks.Callback):
    """What a callback reads at the end of each epoch, which must be what the history keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.logs: list[dict[str, Any]] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.logs.append({name: np.asarray(value).tolist() for name, value in logs.items()})


def history_of_every_metric() -> dict[str, Any]:
    """Trains on 5 full global batches and one of 5 rows; the last rank has nothing to validate on."""
    rank, size = tfdist.rank(), tfdist.size()
    validation = tf.data.Dataset.from_tensor_slices(labelled(37))
    if size > 1:
        start, count = (0, 37) if size == 2 else (12 * rank, [12, 12, 13, 0][rank])
        validation = validation.skip(start).take(count if rank < size - 1 else 0)
    model, seen = every_kind_of_metric(), Seen()
    history = model.fit(
        tfdist.shard(labelled(125), batch_size=24 // size, shuffle=False),
        validation_data=validation.batch(10),
        epochs=2,
        verbose=0,
        callbacks=[seen],
    ).history
    assert len(history) == 2 * 14
    plain = {name: np.asarray(values, np.float64).tolist() for name, values in history.items()}
    assert [{name: values[epoch] for name, values in plain.items()} for epoch in range(2)] == seen.logs
    return plain


def assert_equal_history(results: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    assert results == [results[0]] * len(results), "ranks differ"
    assert set(results[0]) == set(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(results[0][name], values, rtol=1e-5, atol=1e-6, err_msg=name)


@WORLDS
def test_history_of_every_metric_is_that_of_one_process(world: World) -> None:
    results, expected = world.call(history_of_every_metric), in_one_process(history_of_every_metric)
    for history in (*results, expected):
        for output in ("yes", "kind", "size"):
            # Keras takes these as means over batches, whatever their sizes, so they depend on how data are batched.
            # Where ranks have equal batches they are exact: see "loss and metrics as dicts".
            del history[f"{output}_loss"], history[f"val_{output}_loss"]
    assert_equal_history(results, expected)


def fit_with(option: str) -> dict[str, Any]:
    """Trains with one option of `fit()` or `compile()`, each rank on its share of the rows."""
    x, y = models.data("dense")
    share = bodies.share
    weight = np.random.default_rng(2).random(len(x)).astype("float32")
    other = x[::-1].copy(), y, weight
    options: dict[str, Any] = {
        "validation_data": {"validation_data": [*map(share, other[:2])]},
        "validation_data, weighted": {"validation_data": [*map(share, other)], "validation_batch_size": 3},
        "validation_steps": {"validation_data": [*map(share, other)], "validation_steps": 2},
        "validation_split": {"validation_split": 0.25},
        "validation_freq": {"validation_data": [*map(share, other)], "validation_freq": 2},
        "class_weight": {"class_weight": {0: 0.2, 1: 3.0, 2: 1.0}},
        "sample_weight": {"sample_weight": share(weight)},
        "steps_per_execution": {"validation_data": [*map(share, other)]},
    }[option]
    options["validation_data"] = options.get("validation_data") and tuple(options["validation_data"])
    keras.utils.set_random_seed(3)
    model = models.dense()
    model.compile(
        bodies.wrap(keras.optimizers.Adam(0.01)),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        weighted_metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2, name="top")],
        steps_per_execution=3 if option == "steps_per_execution" else 1,
    )
    before = bodies.weights_of(model)
    batch = models.GLOBAL_BATCH // tfdist.size()
    history = model.fit(share(x), share(y), batch_size=batch, shuffle=False, epochs=3, verbose=0, **options)
    return bodies.outcome(model, before) | {"history": history.history}


@PAIRS
@pytest.mark.parametrize(
    "option",
    [
        "validation_data",
        "validation_data, weighted",
        "validation_steps",
        "validation_split",
        "validation_freq",
        "class_weight",
        "sample_weight",
        "steps_per_execution",
    ],
)
def test_options_of_fit_work_as_in_one_process(world: World, option: str) -> None:
    expected = in_one_process(fit_with, option)
    results = world.call(fit_with, option)
    assert_equal_history([result["history"] for result in results], expected["history"])
    assert len({result["digest"] for result in results}) == 1, "ranks differ"
    assert results[0]["iterations"] == expected["iterations"] > 0
    assert max(expected["moved"]) > 1e-3
    for actual, wanted in zip(results[0]["weights"], expected["weights"], strict=True):
        np.testing.assert_allclose(actual, wanted, atol=1e-5, rtol=1e-5)
    validates = option.startswith("validation") or option == "steps_per_execution"
    assert ("val_loss" in expected["history"]) == validates
