"""`tfdist.predict` and `tfdist.evaluate`: all ranks together give what one process gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.played_ranks import as_rank
from tests.worlds import World, on
from tfdist.data import is_sharded
from tfdist.data.marks import layout_of
from tfdist.prediction_shares import share_of

ROWS = 70


def inputs(rows: int = ROWS) -> np.ndarray:
    return np.random.default_rng(rows).normal(size=(rows, 4)).astype("float32")


class Batches(keras.utils.PyDataset):
    """Batches of growing length."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return (inputs()[index * 5 : index * 5 + 1 + index % 4],)


def growing() -> Any:
    """A dataset of unknown length, in batches of different lengths."""

    def generate() -> Any:
        yield from (Batches(11)[index][0] for index in range(11))

    return tf.data.Dataset.from_generator(generate, output_signature=tf.TensorSpec((None, 4), tf.float32))


def sentences() -> Any:
    """Batches whose rows differ in length from batch to batch."""
    lengths = (3, 2, 2, 5, 4)
    parts = [inputs()[: 2 * length].reshape(2, length, 4) for length in lengths]
    return tf.data.Dataset.from_generator(
        lambda: iter(parts), output_signature=tf.TensorSpec((None, None, 4), tf.float32)
    )


def model_of(kind: str) -> Any:
    keras.utils.set_random_seed(5)
    if kind == "sentences":
        model = keras.Sequential([keras.Input((None, 4)), keras.layers.Dense(3)])
    else:
        left, right = keras.Input((4,), name="left"), keras.Input((4,), name="right")
        first, second = keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)
        if kind == "plain":
            model = keras.Model(left, first(left))
        elif kind == "list":
            model = keras.Model(left, [first(left), second(left)])
        else:
            outputs = {"sum": first(left + right), "deep": {"product": second(left * right)}}
            model = keras.Model({"left": left, "right": right}, outputs)
    return model


Case = tuple[str, Callable[[], Any], dict[str, Any]]
WHOLE: dict[str, Case] = {
    "arrays": ("plain", inputs, {"batch_size": 16}),
    "arrays, default batch": ("plain", inputs, {}),
    "tensors": ("plain", lambda: tf.constant(inputs()), {"batch_size": 8, "steps": 3}),
    "fewer batches than ranks": ("plain", lambda: inputs(3), {"batch_size": 2}),
    "one row": ("plain", lambda: inputs(1), {}),
    "structures": ("dict", lambda: {"left": inputs(), "right": -inputs()}, {"batch_size": 8}),
    "list of outputs": ("list", inputs, {"batch_size": 8}),
    "dataset": ("plain", lambda: tf.data.Dataset.from_tensor_slices(inputs()).batch(8), {}),
    "dataset of pairs": (
        "plain",
        lambda: tf.data.Dataset.from_tensor_slices((inputs(), np.zeros(ROWS))).batch(8),
        {},
    ),
    "dataset of one batch": ("list", lambda: tf.data.Dataset.from_tensors(inputs()), {}),
    "unknown length": ("plain", growing, {}),
    "unknown length in steps": ("plain", growing, {"steps": 7}),
    "lengths that vary": ("sentences", sentences, {}),
    "no end": ("plain", lambda: tf.data.Dataset.from_tensors(inputs(5)).repeat(), {"steps": 5}),
    "PyDataset": ("plain", lambda: Batches(13), {}),
    "PyDataset in steps": ("list", lambda: Batches(13), {"steps": 6}),
    "executions of 3: arrays": ("plain", inputs, {"batch_size": 8}),
    "executions of 3: dataset": ("plain", growing, {}),
    "executions of 3: pairs": (
        "plain",
        lambda: tf.data.Dataset.from_tensor_slices((inputs(), np.zeros(ROWS))).batch(8),
        {},
    ),
    "executions of 3: PyDataset": ("list", lambda: Batches(13), {}),
}
SAMPLES = ("plain", lambda: tf.data.Dataset.from_tensor_slices(inputs()), {"batch_size": 8})
SHARDS: dict[str, Callable[[], Any]] = {
    "arrays": lambda: tfdist.shard((inputs(),), batch_size=8, shuffle=False),
    "few rows": lambda: tfdist.shard((inputs(),), batch_size=30, shuffle=False),
    "samples": lambda: (
        tfdist.shard(tf.data.Dataset.from_tensor_slices(inputs()), remainder="keep")
        .map(lambda row: row, num_parallel_calls=2)
        .batch(7)
        .prefetch(2)
    ),
    "batches": lambda: tfdist.shard(
        tf.data.Dataset.from_tensor_slices(inputs()).batch(8), remainder="keep"
    ).cache(),
}


def prepared(name: str, kind: str) -> Any:
    model = model_of(kind)
    if name.startswith("executions of 3"):
        model.compile(steps_per_execution=3)
    return model


def predict_everything(gather: str) -> dict[str, Any]:
    """Results by case, and what a shard's predictions and a local `predict` gave."""
    found: dict[str, Any] = {}
    for name, (kind, make, options) in {**WHOLE, "samples": SAMPLES}.items():
        result = tfdist.predict(prepared(name, kind), make(), gather=gather, verbose=0, **options)
        found[name] = keras.tree.map_structure(plain, result)
    model = model_of("plain")
    for name, make in SHARDS.items():
        found[f"shard of {name}"] = tfdist.predict(model, make(), gather=gather, verbose=0)
    kept = tfdist.shard(Batches(13), remainder="keep")
    found["shard of PyDataset"] = tfdist.predict(model, kept, gather=gather, verbose=0)
    if tfdist.rank() == 0:
        found["local"] = model.predict(inputs(), verbose=0)
    return found


def plain(leaf: Any) -> Any:
    return leaf.to_list() if isinstance(leaf, tf.RaggedTensor) else leaf


def assert_same(actual: Any, expected: Any, *, exactly: bool, name: str) -> None:
    keras.tree.assert_same_structure(actual, expected)
    for left, right in zip(keras.tree.flatten(actual), keras.tree.flatten(expected), strict=True):
        if exactly:
            np.testing.assert_array_equal(left, right, err_msg=name)
        else:
            np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-6, err_msg=name)


def test_predictions_equal_one_process_and_are_in_order(world: World) -> None:
    expected = {}
    for name, (kind, make, options) in WHOLE.items():
        result = prepared(name, kind).predict(make(), verbose=0, **options)
        expected[name] = keras.tree.map_structure(plain, result)
    whole = model_of("plain").predict(inputs(), batch_size=8, verbose=0)
    expected |= dict.fromkeys(("samples", "local", *(f"shard of {name}" for name in SHARDS)), whole)
    expected["shard of PyDataset"] = expected["PyDataset"]

    gather = "root" if world.size == 2 else "all"
    for rank, found in enumerate(world.call(predict_everything, gather)):
        if gather == "root" and rank > 0:
            assert set(found) == set(expected) - {"local"}
            assert set(map(type, found.values())) == {type(None)}
            continue
        for name, result in found.items():
            # Several batches in one graph share its threads and buffers, which decide how sums are rounded.
            exactly = (name in WHOLE and not name.startswith("executions of 3")) or name == "samples"
            assert_same(result, expected[name], exactly=exactly, name=name)
        assert set(found) == set(expected) - (set() if rank == 0 else {"local"})


def failures() -> dict[str, str]:
    """What a rank is told if another fails, and that all can go on."""
    model = model_of("plain")
    model.compile(loss="mse")
    rank = tfdist.rank()
    said = {}

    def broken() -> Any:
        yield inputs(4)
        if rank == 1:
            raise RuntimeError("disk on fire")
        yield inputs(4)

    signature = tf.TensorSpec((4, 4), tf.float32)
    pairs = (signature, tf.TensorSpec((4, 3), tf.float32))
    data = tf.data.Dataset.from_generator(broken, output_signature=signature)
    labelled = tf.data.Dataset.from_generator(broken, output_signature=signature)
    labelled = labelled.map(lambda x: (x, x[:, :3]))
    assert labelled.element_spec == pairs
    for name, action in {
        "input of predict": lambda: tfdist.predict(model, data, verbose=0),
        "input of evaluate": lambda: tfdist.evaluate(model, labelled, verbose=0),
        "other rows": lambda: tfdist.predict(model, inputs(4 + rank), verbose=0),
        "other gather": lambda: tfdist.predict(model, inputs(), gather="all" if rank else "root", verbose=0),
        "one is refused": lambda: tfdist.predict(model, iter([]) if rank else inputs(), verbose=0),
    }.items():
        try:
            action()
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
        else:
            said[name] = "no error"
    said["afterwards"] = str(tfdist.predict(model, inputs(), verbose=0).shape)
    return said


@on(("tf", 2))
def test_a_rank_that_fails_takes_the_others_with_it(world: World) -> None:
    first, second = world.call(failures)
    for name in ("input of predict", "input of evaluate"):
        assert "disk on fire" in second[name]
        assert first[name].startswith("PeerFailedError: rank 0 leaves tfdist."), first[name]
        assert "rank 1 with" in first[name]
        assert "disk on fire" in first[name]
    for name in ("other rows", "other gather"):
        assert first[name] == second[name]
        assert first[name].startswith("CollectiveMismatchError"), first[name]
    assert second["one is refused"].startswith("ValueError: tfdist.predict cannot deal out a list_iterator")
    assert first["one is refused"].startswith("PeerFailedError")
    assert first["afterwards"] == second["afterwards"] == f"({ROWS}, 3)"


# Evaluation.


def classifier() -> Any:
    keras.utils.set_random_seed(5)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, "sigmoid")])
    model.compile(
        loss="binary_crossentropy",
        metrics=["accuracy", keras.metrics.AUC(name="auc"), keras.metrics.Precision(name="precision")],
        weighted_metrics=[keras.metrics.FalsePositives(name="false")],
    )
    return model


def labelled(rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    x = inputs(rows)
    return x, (x[:, :1] > 0.3).astype("float32")


def evaluate_in_many_ways() -> dict[str, Any]:
    model = classifier()
    shard = tfdist.shard(labelled(), batch_size=8, shuffle=False)
    samples = tfdist.shard(tf.data.Dataset.from_tensor_slices(labelled()), remainder="keep")
    x, y = (values[tfdist.rank() :: tfdist.size()] for values in labelled())
    last = tfdist.rank() == tfdist.size() - 1
    found = {
        "arrays": tfdist.evaluate(model, shard, verbose=0),
        "samples": tfdist.evaluate(model, samples.batch(9).prefetch(1), verbose=0),
        "own part": tfdist.evaluate(model, x, y=y, batch_size=7, verbose=0),
    }
    everything = tf.data.Dataset.from_tensor_slices(labelled()).batch(16)
    found["one rank has all"] = tfdist.evaluate(model, everything.take(5 if last else 0), verbose=0)
    return found


@on(("horovod", 2), ("tf", 4))
def test_evaluation_equals_one_process(world: World) -> None:
    expected = classifier().evaluate(*labelled(), verbose=0, return_dict=True)
    results = world.call(evaluate_in_many_ways)
    assert results == [results[0]] * world.size
    for name, values in results[0].items():
        assert set(values) == set(expected)
        for metric, value in expected.items():
            np.testing.assert_allclose(values[metric], value, rtol=1e-5, err_msg=f"{name}: {metric}")


class Reads(keras.callbacks.Callback):
    """Reads the logs of an evaluation, and evaluates a shard itself while `fit()` runs."""

    def __init__(self, data: Any = None) -> None:
        super().__init__()
        self.data = data
        self.logs: Any = None

    def on_test_end(self, logs: Any = None) -> None:
        self.logs = dict(logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self.data is not None:
            self.inside = self.model.evaluate(self.data, verbose=0, return_dict=True)


def model_evaluate() -> dict[str, Any]:
    """Keras's own `evaluate` on a shard, on other data, and with a failure."""
    model, reads = classifier(), Reads()
    shard = tfdist.shard(labelled(), batch_size=8, shuffle=False).map(lambda x, y: (x, y))
    found = {
        "dict": model.evaluate(shard, verbose=0, return_dict=True, callbacks=[reads]),
        "by name": model.evaluate(x=shard, verbose=0, return_dict=True),
        "tfdist.evaluate": tfdist.evaluate(model, shard, verbose=0),
        "list": model.evaluate(shard, verbose=0),
        "callback": reads.logs,
    }
    if tfdist.rank() == 0:
        found["local"] = model.evaluate(*labelled(), verbose=0, return_dict=True)
        with tfdist.local():
            model.evaluate(shard, verbose=0)
    model.compile(
        tfdist.DistributedOptimizer(keras.optimizers.SGD(0.0)), "mse", metrics=[keras.metrics.R2Score()]
    )
    inside = Reads(shard)
    history = model.fit(shard, validation_data=shard, callbacks=[inside], verbose=0).history
    found["inside fit"] = {f"val_{name}": value for name, value in inside.inside.items()}
    found["validation"] = {name: history[name][0] for name in found["inside fit"]}

    def broken(x: Any) -> Any:
        raise RuntimeError("disk on fire")

    def read(x: Any, y: Any) -> Any:
        return tf.ensure_shape(tf.py_function(broken, [x], tf.float32), [None, 4]), y

    bad = shard.map(read) if tfdist.rank() == 1 else shard
    try:
        model.evaluate(bad, verbose=0)
    except Exception as error:
        found["failure"] = f"{type(error).__name__}: {error}"
    return found


@on(("tf", 2), ("horovod", 2))
def test_evaluate_of_keras_is_global_on_shards_alone(world: World) -> None:
    expected = classifier().evaluate(*labelled(), verbose=0, return_dict=True)
    first, second = world.call(model_evaluate)
    assert first.pop("local") == pytest.approx(expected, rel=1e-5)
    for found in (first, second):
        for way in ("dict", "by name", "tfdist.evaluate", "callback"):
            assert found[way] == pytest.approx(expected, rel=1e-5), way
        assert sorted(found["list"]) == pytest.approx(sorted(expected.values()), rel=1e-5)
        assert found["inside fit"] == found["validation"] == first["validation"]
    assert "disk on fire" in second["failure"]
    assert first["failure"].startswith("PeerFailedError: rank 0 leaves tfdist.evaluate")


# Without other processes.


class Largest(keras.metrics.Metric):
    """A metric whose states don't add up."""

    def __init__(self) -> None:
        super().__init__(name="largest")
        self.value = self.add_variable((), "zeros", name="value")

    def update_state(self, y: Any, predicted: Any, sample_weight: Any = None) -> None:
        self.value.assign(keras.ops.maximum(self.value, keras.ops.max(predicted)))

    def result(self) -> Any:
        return self.value + 0.0


def test_a_metric_that_can_only_be_averaged_is_named_once(capfd: pytest.CaptureFixture[str]) -> None:
    model = model_of("plain")
    model.compile(loss="mse", metrics=[Largest()])
    said = []
    for rank, ranks in ((0, 1), (1, 2), (0, 2), (0, 2)):
        with as_rank(rank, ranks):
            tfdist.evaluate(model, inputs(), y=inputs()[:, :3], verbose=0)
        said.append(capfd.readouterr().out.count("metric 'largest' is not one of Keras's"))
    assert said == [0, 0, 1, 0]


def transformed(shard: Any) -> list[Any]:
    return [
        shard,
        shard.batch(2).prefetch(1),
        shard.map(lambda x: x, num_parallel_calls=2).cache().with_options(tf.data.Options()),
        tf.data.Dataset.zip((shard, shard)),
        shard.shuffle(10).repeat(2).filter(lambda x: True),
    ]


def test_shards_are_recognised_however_transformed() -> None:
    dataset = tf.data.Dataset.range(12)
    with as_rank(1, 2):
        shards = [tfdist.shard(dataset), tfdist.shard(inputs()), tfdist.shard(dataset.shuffle(3, seed=1))]
        assert all(is_sharded(each) for shard in shards for each in transformed(shard))
        assert is_sharded(tfdist.shard(Batches(4)))
        for other in (dataset, dataset.shard(2, 1), dataset.batch(2), inputs(), Batches(4), None):
            assert not is_sharded(other)
    with as_rank(0, 1):
        assert not any(map(is_sharded, (tfdist.shard(dataset), tfdist.shard(inputs()), dataset)))


def test_a_shard_whose_order_is_lost_is_refused() -> None:
    dataset = tf.data.Dataset.range(12)
    with as_rank(1, 2):
        for lost in (
            tfdist.shard(inputs()),
            tfdist.shard(dataset, shuffle=4),
            tfdist.shard(dataset, shuffle=True),
        ):
            with pytest.raises(ValueError, match="Make it with `shuffle=False`"):
                layout_of(lost.map(lambda x: x))
        kept, rows = tfdist.shard(dataset), tfdist.shard(inputs(), shuffle=False)
        for changed in (
            kept.shuffle(3),
            kept.batch(2).batch(2),
            kept.repeat(2),
            rows.unbatch(),
            rows.batch(2),
        ):
            with pytest.raises(ValueError, match="Received a shard followed by"):
                layout_of(changed)
        with pytest.raises(ValueError, match="steps_per_execution=2"):
            share_of(tfdist.shard(dataset.batch(2)), None, None, 2)
        share_of(kept.batch(2), None, None, 2)


def test_what_cannot_be_dealt_out_is_refused() -> None:
    tf.random.set_seed(None)  # a seed for everything, left by another test, would be one for this shuffle
    shuffled = tf.data.Dataset.range(8).shuffle(4).batch(2)
    with as_rank(0, 2):
        for data, options, message in (
            (iter([inputs()]), {}, "list_iterator"),
            (tf.data.Dataset.range(3).repeat().batch(2), {}, "Pass `steps`"),
            (shuffled, {}, "shuffled without a seed"),
            ((inputs(3), inputs(4)), {}, "same number of rows"),
            (np.float32(1), {}, "same number of rows"),
            (Batches(3), {"batch_size": 4}, "batch_size=4"),
            (tfdist.shard(inputs(), shuffle=False), {"batch_size": 4}, "batch_size=4"),
            (inputs(), {"batch_size": 0}, "positive"),
            (inputs(), {"steps": 0}, "positive"),
        ):
            with pytest.raises(ValueError, match=message):
                share_of(data, options.get("batch_size"), options.get("steps"), 1)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_shares_of_arrays_are_consecutive_whole_batches(ranks: int) -> None:
    shares = []
    for rank in range(ranks):
        with as_rank(rank, ranks):
            shares.append(share_of(inputs(), 8, None, 1).data)
    filled = [share for share in shares if share is not None]
    np.testing.assert_array_equal(np.concatenate(filled), inputs())
    assert all(len(share) % 8 == 0 for share in filled[:-1])
    assert max(map(len, filled)) - min(map(len, filled)) <= 8 + 8 - ROWS % 8


def test_gather_and_empty_data_are_checked() -> None:
    model = model_of("plain")
    with as_rank(0, 1):
        with pytest.raises(ValueError, match="Received: 'some'"):
            tfdist.predict(model, inputs(), gather="some")
        with pytest.raises(ValueError, match="at least one row"):
            tfdist.predict(model, inputs(0), verbose=0)
