"""`sync_batch_norm`: every kind of model, there and back, with weights, names, slots and files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from tests.layers import ranks
from tests.source_tree import search_path
from tfdist.layers import SyncBatchNormalization, sync_batch_norm

PLAIN = keras.layers.BatchNormalization


class Block(keras.layers.Layer):
    """Keeps its layers in an attribute, a list and a wrapper."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.first = PLAIN()
        self.others = [PLAIN(), keras.layers.TimeDistributed(PLAIN())]

    def call(self, inputs: Any, training: bool = False) -> Any:
        hidden = self.first(inputs, training=training)
        for layer in self.others:
            hidden = layer(hidden, training=training)
        return hidden


class Subclassed(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.head = keras.layers.Dense(2)

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.head(self.block(inputs, training=training)[:, 0])


class Late(keras.Model):
    """Makes its layers when it is built."""

    def build(self, input_shape: Any) -> None:
        self.norm = PLAIN()
        self.norm.build(input_shape)
        self.built = True

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.norm(inputs, training=training)


class Own(PLAIN):
    """A user's subclass, which may count on what its parent does."""


def sequential() -> keras.Model:
    return keras.Sequential([keras.layers.Dense(4), PLAIN(name="norm"), keras.layers.Dense(2)])


def kinds_of(model: Any) -> set[type]:
    return {type(layer) for layer in model._flatten_layers() if isinstance(layer, PLAIN)}


def trained(model: Any, x: np.ndarray, y: np.ndarray) -> Any:
    model.compile(keras.optimizers.Adam(0.01), "mse")
    model.fit(x, y, batch_size=4, verbose=0)
    return model


@pytest.mark.parametrize(
    ("make", "shape"),
    [(sequential, (6,)), (Subclassed, (5, 3)), (ranks.image_model, (8, 8, 2))],
    ids=["Sequential", "subclassed", "functional"],
)
@pytest.mark.parametrize("built", [False, True], ids=["unbuilt", "built"])
def test_there_and_back(make: Any, shape: tuple[int, ...], built: bool) -> None:
    random = np.random.default_rng(1)
    x = random.standard_normal((8, *shape)).astype("float32")
    y = random.standard_normal((8, 3 if make is ranks.image_model else 2)).astype("float32")
    model = make()
    if built:
        trained(model, x, y)
        names = [weight.path for weight in model.weights]
        weights, slots = model.get_weights(), [np.asarray(slot) for slot in model.optimizer.variables]
        predicted = model.predict(x, verbose=0)
    assert kinds_of(model) == {PLAIN}
    assert sync_batch_norm(model) is model
    assert kinds_of(sync_batch_norm(model)) == {SyncBatchNormalization}
    if built:
        assert [weight.path for weight in model.weights] == names
        for actual, wanted in zip(model.get_weights(), weights, strict=True):
            np.testing.assert_array_equal(actual, wanted)
        for slot, wanted in zip(model.optimizer.variables, slots, strict=True):
            np.testing.assert_array_equal(slot, wanted)
        np.testing.assert_array_equal(model.predict(x, verbose=0), predicted)
        assert model.train_function is None, "traced with the layers as they were"
        model.fit(x, y, batch_size=4, verbose=0)
    else:
        trained(model, x, y)
    predicted = model.predict(x, verbose=0)
    assert kinds_of(sync_batch_norm(model, undo=True)) == {PLAIN}
    assert all(layer.supports_jit for layer in model._flatten_layers())
    np.testing.assert_array_equal(model.predict(x, verbose=0), predicted)
    model.fit(x, y, batch_size=4, verbose=0)


def test_other_subclasses_stay() -> None:
    model = keras.Sequential([keras.Input((3,)), Own(), PLAIN()])
    assert kinds_of(sync_batch_norm(model)) == {Own, SyncBatchNormalization}


def test_layers_that_do_not_exist_yet_are_an_error() -> None:
    model = Late()
    with pytest.raises(ValueError, match=r"Late .* isn't built and holds no BatchNormalization yet"):
        sync_batch_norm(model)
    model(np.ones((2, 3), "float32"))
    assert kinds_of(sync_batch_norm(model)) == {SyncBatchNormalization}
    without = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    assert sync_batch_norm(without) is without


def test_wrong_arguments() -> None:
    with pytest.raises(TypeError, match=r"takes a keras.Model or a layer; received 'model'"):
        sync_batch_norm("model")
    with pytest.raises(TypeError, match=r"must be a tfdist.ProcessSet"):
        sync_batch_norm(sequential(), process_set=[0])


def test_saved_file_loads_where_the_layer_is_imported(tmp_path: Path) -> None:
    x, y = np.ones((8, 6), "float32"), np.ones((8, 2), "float32")
    model = trained(sync_batch_norm(sequential()), x, y)
    np.save(tmp_path / "predicted.npy", model.predict(x, verbose=0))
    model.save(tmp_path / "synchronized.keras")
    sync_batch_norm(model, undo=True).save(tmp_path / "plain.keras")
    code = (
        "import sys, keras, numpy as np\n"
        "name, kind, package = sys.argv[1:]\n"
        "if package:\n"
        "    import tfdist.layers\n"
        "else:\n"
        "    sys.modules['tfdist'] = None\n"
        "model = keras.models.load_model(name)\n"
        "assert type(model.get_layer('norm')).__name__ == kind\n"
        "predicted = model.predict(np.ones((8, 6), 'float32'), verbose=0)\n"
        "np.testing.assert_allclose(predicted, np.load('predicted.npy'), rtol=1e-6)\n"
        "assert int(model.optimizer.iterations) == 2\n"
    )
    for name, kind, package in (
        ("synchronized.keras", "SyncBatchNormalization", "tfdist.layers"),
        ("plain.keras", "BatchNormalization", ""),
    ):
        result = subprocess.run(
            [sys.executable, "-c", code, name, kind, package],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            env=_environment(),
        )
        assert result.returncode == 0, result.stderr[-3000:]


def test_weight_files_of_plain_models(tmp_path: Path) -> None:
    """Weights go both ways through a model that is plain for a moment."""
    x, y = np.ones((8, 6), "float32"), np.ones((8, 2), "float32")
    synchronized, plain = trained(sync_batch_norm(sequential()), x, y), trained(sequential(), x * 2, y)
    path = tmp_path / "model.weights.h5"
    sync_batch_norm(synchronized, undo=True).save_weights(path)
    sync_batch_norm(synchronized)
    plain.load_weights(path)
    for actual, wanted in zip(plain.get_weights(), synchronized.get_weights(), strict=True):
        np.testing.assert_array_equal(actual, wanted)
    assert kinds_of(synchronized) == {SyncBatchNormalization}


def test_settings_survive_a_clone() -> None:
    layer = SyncBatchNormalization(axis=1, momentum=0.5, epsilon=0.1, center=False)
    clone = SyncBatchNormalization.from_config(layer.get_config())
    assert clone.get_config() == layer.get_config()
    assert set(layer.get_config()) == set(PLAIN().get_config())


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": search_path(), "CUDA_VISIBLE_DEVICES": "-1"}
