"""`sync_batch_norm(model)`: every BatchNormalization of a model becomes a SyncBatchNormalization, or back.

A model refers to a layer from nodes of its graph, attributes, lists, wrappers and closures, so putting another
layer in its place would miss some of them in models that are more than a graph, and give up the optimizer's slots.
But `SyncBatchNormalization` has the variables and settings of its parent and none of its own, so a layer becomes
one, and stops to be one, by its class alone: the object stays, and with it its weights, name and every reference.
"""

from __future__ import annotations

from typing import Any

import keras

from tfdist.layers.sync_batch_normalization import SyncBatchNormalization, checked_process_set
from tfdist.process_sets import ProcessSet


def sync_batch_norm(model: Any, process_set: ProcessSet | None = None, *, undo: bool = False) -> Any:
    """Makes every BatchNormalization of a model a `SyncBatchNormalization`; weights and names stay.

    Converts in place: Functional, Sequential and subclassed models, built or not, compiled or not, nested models
    and layers within layers. Subclasses of BatchNormalization other than these two stay as they are. Every rank
    calls it, before training.

    Args:
        model: a `keras.Model`, or a layer.
        process_set: ranks that share their batches; all by default.
        undo: whether to turn every SyncBatchNormalization back into a BatchNormalization, as for a file that
            loads without tfdist, or to load and save `.weights.h5` files of plain models.

    Returns:
        `model`.

    Raises:
        TypeError: no Keras model or layer.
        ValueError: the model isn't built and holds no such layer yet: it makes them in `build`.

    Example:
        >>> import keras, tfdist
        >>> tfdist.init()
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization()])
        >>> type(tfdist.layers.sync_batch_norm(model).layers[0]).__name__
        'SyncBatchNormalization'
        >>> type(tfdist.layers.sync_batch_norm(model, undo=True).layers[0]).__name__
        'BatchNormalization'
    """
    if not isinstance(model, keras.layers.Layer):
        raise TypeError(f"sync_batch_norm takes a keras.Model or a layer; received {model!r}.")
    if process_set is not None:
        checked_process_set(process_set)
    plain, synchronized = keras.layers.BatchNormalization, SyncBatchNormalization
    before, after = (synchronized, plain) if undo else (plain, synchronized)
    layers = model._flatten_layers()
    converted = [layer for layer in layers if type(layer) in (plain, synchronized)]
    if not converted and not all(layer.built for layer in layers):
        raise ValueError(
            f"{type(model).__name__} {model.name!r} isn't built and holds no BatchNormalization yet. Build it "
            "first: call it on a batch, or `model.build(input_shape)`."
        )
    for layer in converted:
        if type(layer) is before:
            layer.__class__ = after
        layer.__dict__.pop("process_set", None)
        if undo:
            layer.supports_jit = True  # an attribute of plain layers, a property of the others
        elif process_set is not None:
            layer.process_set = process_set
    for each in layers:
        if isinstance(each, keras.Model):  # functions that it has traced hold the layers as they were
            each.train_function = each.test_function = each.predict_function = None
            if each.compiled and each.jit_compile:
                # Keras asks the layers when the value changes, and leaves XLA off, with a warning, if one can't.
                each.jit_compile = False
                each.jit_compile = True
    return model
