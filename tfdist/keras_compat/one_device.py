"""An optimizer's update on the copies of one device, as if there were no strategy (Keras >= 3.3).

Problem: in replica context Keras's optimizers sum gradients again and enter `merge_call` for every part of an
update. TensorFlow forbids that inside a `cond`, so moving averages of weights (`use_ema`), accumulated gradients
and loss scaling crash under MirroredStrategy; under others, clipping acts on a replica's own gradients.

Solution: once gradients are global, every device can make the whole update by itself, on its own copies of weights
and slots, as one process does. While it is traced, each `keras.Variable` holds its copy on that device, and no
strategy is in force. Replicas are traced one after another, so nobody else sees that.

TensorFlow has no public way to leave a strategy; `_push_per_thread_mode` is what its own contexts call
(TensorFlow 2.16 to 2.21).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from tfdist.keras_compat.partial_optimizer import innermost


@contextlib.contextmanager
def without_strategy() -> Iterator[None]:
    """Inside, on this thread, TensorFlow knows of no strategy: variables are made once, nothing is merged."""
    from tensorflow.python.distribute import distribute_lib
    from tensorflow.python.framework import ops

    graph = ops.get_default_graph()
    distribute_lib._push_per_thread_mode(distribute_lib._get_default_replica_mode())
    try:
        yield
    finally:
        graph._distribution_strategy_stack.pop(-1)


@contextlib.contextmanager
def plain_variables() -> Iterator[None]:
    """Inside, lifted out of any graph, `tf.Variable` makes one variable, whatever strategy's scope it is in."""
    import tensorflow as tf
    from tensorflow.python.framework import ops

    with tf.init_scope(), without_strategy():
        graph = ops.get_default_graph()
        before = graph._variable_creator_stack
        graph._variable_creator_stack = []
        try:
            yield
        finally:
            graph._variable_creator_stack = before


@contextlib.contextmanager
def on_one_device(optimizer: Any, variables: Sequence[Any], number: int) -> Iterator[list[Any]]:
    """Inside, variables are their copies on one device, and `optimizer` updates them as in a process of its own.

    Args:
        optimizer: built; the outermost that updates `variables`.
        variables: the model's.
        number: of the device, 0-based, among this process's.

    Yields:
        `variables`, where plain `tf.Variable`s are replaced by their copies.
    """
    import keras
    import tensorflow as tf

    kept: list[tuple[Any, str, Any]] = []

    def replace(owner: Any, name: str, value: Any) -> None:
        kept.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    chosen = []
    for variable in [*variables, *optimizer.variables]:
        if not isinstance(variable, keras.Variable):
            chosen.append(copy_of(variable, number))
            continue
        chosen.append(variable)
        copy = copy_of(variable._value, number)
        if copy is not variable._value:
            replace(variable, "_value", copy)
    try:
        with without_strategy():
            alone = tf.distribute.get_strategy()
            for each in _all_of(optimizer):
                replace(each, "_distribution_strategy", alone)
            yield chosen[: len(variables)]
    finally:
        for owner, name, value in reversed(kept):
            setattr(owner, name, value)


def copy_of(variable: Any, number: int) -> Any:
    """The copy of a `tf.Variable` on one device; the variable itself, if there is only one."""
    import tensorflow as tf

    if isinstance(variable, tf.distribute.DistributedValues):
        return variable.values[number]
    return getattr(variable, "_v", variable)  # what an AggregatingVariable aggregates into


def _all_of(optimizer: Any) -> list[Any]:
    """An optimizer and those inside it."""
    found = {id(optimizer): optimizer}
    for each in innermost(optimizer):
        found[id(each)] = each
    inner = getattr(optimizer, "inner_optimizer", None)
    while inner is not None:
        found[id(inner)] = inner
        inner = getattr(inner, "inner_optimizer", None)
    return list(found.values())
