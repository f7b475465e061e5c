"""Activity regularizers of Keras before 3.14, on a part of a batch.

Problem: there a layer's activity regularizer adds up the rows of its batch; from 3.14 on it takes their mean, like
the losses beside it. Averaged over the slices of a batch, sums would come out too small by the number of slices.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from tfdist.keras_compat.replaced import replaced

_SUMS_ROWS = tuple(int(part) for part in keras.__version__.split(".")[:2]) < (3, 14)

Regularizers = Sequence[tuple[Any, Callable[[Any], Any]]]  # layers, with what regularizes them for a while


class _Current(threading.local):
    regularizers: Regularizers = ()


_current = _Current()


def current() -> Regularizers:
    """What is in place here, for `in_place` when the same code runs again."""
    return _current.regularizers


@contextlib.contextmanager
def in_place(regularizers: Regularizers) -> Iterator[None]:
    """Inside, layers have these activity regularizers."""
    before, _current.regularizers = _current.regularizers, regularizers
    try:
        with contextlib.ExitStack() as stack:
            for layer, regularizer in regularizers:
                stack.enter_context(replaced(layer, {"activity_regularizer": regularizer}))
            yield
    finally:
        _current.regularizers = before


def on_part_of_batch(layer: Any, call: Callable[..., Any], share: Any) -> Callable[..., Any]:
    """`call`, with activity losses whose average over parts of the batch, by their rows, is that of the batch.

    Args:
        layer: whose code `call` runs, with all layers inside.
        call: runs on a part of the batch.
        share: rows of the part over rows of the batch, a float scalar.
    """
    if not _SUMS_ROWS:
        return call

    def scaled(regularizer: Any) -> Callable[[Any], Any]:
        return lambda outputs: regularizer(outputs) / keras.ops.cast(share, outputs.dtype)

    def run(*args: Any, **kwargs: Any) -> Any:
        regularized = [each for each in layer._flatten_layers() if each.activity_regularizer is not None]
        with in_place([(each, scaled(each.activity_regularizer)) for each in regularized]):
            return call(*args, **kwargs)

    return run
