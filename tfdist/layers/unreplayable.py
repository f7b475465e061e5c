"""Refuses what would not do the same a second time.

Problem: a raw `tf.random` operation draws other numbers when it runs again, a `tf.py_function` may do anything,
and a `tf.Variable` that Keras doesn't know may have been updated by then. The gradients would be wrong without a
word.

Solution: TensorFlow tells every operation that is created or run eagerly, inside loops and branches too
(`op_callbacks`), and its registry which ones have state. Functions that were traced before are searched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdist.layers import remembering

# Stateful by name only: they do the same again, or only look.
_HARMLESS = frozenset([
    "Assert", "Case", "CheckNumerics", "CheckNumericsV2", "HashTableV2", "If", "LookupTableExportV2",
    "LookupTableFindV2", "LookupTableSizeV2", "MutableHashTableV2", "PartitionedCall",
    "Placeholder", "Print", "PrintV2", "StatefulCase", "StatefulPartitionedCall", "VarHandleOp",
    "VarIsInitializedOp", "VariableShape", "While",
])  # fmt: skip
_READS = frozenset(["ReadVariableOp", "ResourceGather", "ResourceGatherNd"])


@contextlib.contextmanager
def refusing_unreplayable(name: str) -> Iterator[None]:
    """Inside, an operation that can't be replayed raises a ValueError.

    Args:
        name: what is recomputed, for the message.
    """
    from tensorflow.python.eager import record
    from tensorflow.python.framework import op_callbacks

    seen: set[str] = set()
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    start = len(graph.get_operations()) if graph is not None else 0

    def look(kind: Any, *_: Any, **__: Any) -> None:
        if remembering.is_asking():
            return
        kind = kind.decode() if isinstance(kind, bytes) else kind
        if _definition_of(kind) is None:  # in eager mode a call is reported under the function's name
            _search(kind, name, seen)
        else:
            _check(kind, name)

    op_callbacks.add_op_callback(look)
    try:
        # Eager operations may read a variable without one more operation, but tapes are told.
        with record.VariableWatcher() as watcher:
            yield
    finally:
        op_callbacks.remove_op_callback(look)
    if watcher.watched_variables():
        _check("ReadVariableOp", name)
    # Calls of functions, and loops and branches, which hold functions, are not told everywhere.
    for operation in graph.get_operations()[start:] if graph is not None else ():
        _search_called(operation.node_def, name, seen)


def _search(function: str, name: str, seen: set[str]) -> None:
    """Checks what a function holds that was traced before."""
    from tensorflow.python.eager import context

    if function in seen:
        return
    seen.add(function)
    for node in context.context().get_function_def(function).node_def:
        _check(node.op, name)
        _search_called(node, name, seen)


def _search_called(node: Any, name: str, seen: set[str]) -> None:
    for value in node.attr.values():
        for called in (value.func.name, *(each.name for each in value.list.func)):
            if called:
                _search(called, name, seen)


def _definition_of(kind: str) -> Any:
    from tensorflow.python.framework import op_def_registry

    return op_def_registry.get(kind)


def _check(kind: str, name: str) -> None:
    definition = _definition_of(kind)
    if definition is None or not definition.is_stateful or kind in _HARMLESS:
        return
    if kind in _READS:
        fix = "Make it with `self.add_weight(...)`, or as a keras.Variable attribute, in place of tf.Variable"
    elif "Py" in kind and "Func" in kind:
        fix = "Call it outside of what is recomputed, or compute with tf or keras.ops"
    elif "Assign" in kind or "Scatter" in kind:
        fix = "Keep state in variables from `self.add_weight(...)`, assigned by `variable.assign(...)`"
    else:
        fix = "For random numbers use keras.random with a keras.random.SeedGenerator; call others outside"
    raise ValueError(
        f"What is recomputed must do the same when it runs again; received the operation {kind} in {name}, which "
        f"need not. {fix}."
    )
