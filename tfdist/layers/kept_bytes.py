"""What training keeps of each node of a model: measured in the graph that TensorFlow makes of a training step.

Problem: the sizes of layers' outputs tell little of what their gradients need: attention keeps its scores, an
activation its input, an addition nothing.

Solution: forward and backward pass are traced once, without running anything. A tensor made by a node's operations
and read by operations of the backward pass is kept; its shape and dtype are known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_compat.functional_graphs import node_by_node, nodes_of
from tfdist.keras_compat.replay_scopes import state_of
from tfdist.layers.cuts import Chain

# Operations whose result shares the memory of their input.
_VIEWS = frozenset(
    ["Identity", "IdentityN", "Reshape", "Squeeze", "ExpandDims", "StopGradient", "EnsureShape"]
)
_NOT_KEPT = frozenset(["Placeholder", "ReadVariableOp", "Const", "VarHandleOp"])


def measure_chain(functional: Any, batch_size: int) -> Chain:
    """Bytes that a training step keeps of each node, and bytes that cross from node to node.

    Args:
        functional: from `graph_of`.
        batch_size: rows, where the model's inputs leave them open.
    """
    ends: list[int] = []
    sizes: dict[int, int] = {}
    specs = [
        tf.TensorSpec(
            [batch_size if n is None and i == 0 else n for i, n in enumerate(each.shape)], each.dtype
        )
        for each in functional.inputs
    ]

    def after(node: Any, values: dict[int, Any]) -> None:
        ends.append(len(tf.compat.v1.get_default_graph().get_operations()))
        sizes.update({id(symbolic): _bytes_of(values[id(symbolic)]) for symbolic in node.outputs})

    @tf.function(autograph=False)  # type: ignore[untyped-decorator, unused-ignore]
    def step(*inputs: Any) -> Any:
        structure = keras.tree.pack_sequence_as(functional._inputs_struct, list(inputs))
        with tf.GradientTape() as tape, node_by_node(functional, after):
            outputs = keras.tree.flatten(functional(structure, training=True))
            floats = [each for each in outputs if each.dtype.is_floating]
            loss = tf.add_n([tf.reduce_sum(tf.cast(each, tf.float32)) for each in floats])
        return [each for each in tape.gradient(loss, functional.trainable_variables) if each is not None]

    state_of(functional)  # makes Keras's global seed, which can't be made while tracing
    graph = step.get_concrete_function(*specs).graph
    functional._clear_losses()  # of this graph
    return Chain(_kept(graph.get_operations(), ends), _across(functional, nodes_of(functional), sizes))


def _kept(operations: Sequence[Any], ends: Sequence[int]) -> list[int]:
    node_of: dict[Any, int] = {}
    start = 0
    for number, end in enumerate(ends):
        node_of.update(dict.fromkeys(operations[start:end], number))
        start = end
    kept = [0] * len(ends)
    seen: set[int] = set()
    for operation in operations[start:]:
        for tensor in operation.inputs:
            base = _base(tensor)
            if id(base) in seen or base.op not in node_of or base.op.type in _NOT_KEPT:
                continue
            seen.add(id(base))
            kept[node_of[base.op]] += _bytes_of(base)
    return kept


def _base(tensor: Any) -> Any:
    while tensor.op.type in _VIEWS and tensor.op.inputs:
        tensor = tensor.op.inputs[tensor.op.outputs.index(tensor) if tensor.op.type == "IdentityN" else 0]
    return tensor


def _across(functional: Any, nodes: Sequence[Any], sizes: dict[int, int]) -> list[int]:
    """Bytes of the tensors that are made before each boundary and read after it, but the model's inputs."""
    last: dict[int, int] = {id(symbolic): len(nodes) for symbolic in functional.outputs}
    made: dict[int, int] = {}
    for number, node in enumerate(nodes):
        made.update({id(symbolic): number for symbolic in node.outputs})
        for symbolic in node.input_tensors:
            last[id(symbolic)] = max(last.get(id(symbolic), 0), number)
    across = [0] * (len(nodes) - 1)
    for symbolic, number in made.items():
        for boundary in range(number, min(last.get(symbolic, number), len(across))):
            across[boundary] += sizes.get(symbolic, 0)
    return across


def _bytes_of(tensor: Any) -> int:
    if tensor.dtype in (tf.resource, tf.variant, tf.string) or tensor.shape.rank is None:
        return 0
    return int(math.prod(size or 1 for size in tensor.shape)) * int(tensor.dtype.size)
