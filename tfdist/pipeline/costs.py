"""What the nodes of a model's graph cost: seconds, bytes and parameters."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_compat.functional_graphs import node_by_node, nodes_of, run_node
from tfdist.keras_compat.replay_scopes import state_of
from tfdist.layers.kept_bytes import measure_chain

_RUNS = 5  # the fastest of them counts
_SHORTEST = 1e-7  # seconds
_COPIES_OF_A_WEIGHT = 4  # the weight, its gradient, and two slots, as of Adam


@dataclasses.dataclass(frozen=True)
class Costs:
    """Of the nodes of a graph, in the order in which they run.

    Attributes:
        names: of the nodes' layers or operations.
        parameters: numbers of their weights; those of a shared layer count at its first node.
        parameter_bytes: of the weights.
        activations: bytes that a training step keeps of a micro-batch.
        across: bytes that cross each boundary between two nodes.
        forward: seconds of the forward pass of a micro-batch; zeros if not measured.
        backward: of the backward pass, with the recomputation that comes before it.
    """

    names: Sequence[str]
    parameters: Sequence[int]
    parameter_bytes: Sequence[int]
    activations: Sequence[int]
    across: Sequence[int]
    forward: Sequence[float]
    backward: Sequence[float]

    def by(self, balance: str) -> list[float]:
        """What is balanced: "time", "memory" or "parameters" of each node."""
        if balance == "time":
            return [a + b for a, b in zip(self.forward, self.backward, strict=True)]
        if balance == "parameters":
            return [float(number) for number in self.parameters]
        pairs = zip(self.parameter_bytes, self.activations, strict=True)
        return [float(_COPIES_OF_A_WEIGHT * weights + kept) for weights, kept in pairs]


def measure(functional: Any, rows: int, *, timed: bool) -> Costs:
    """Costs of a model's nodes, for micro-batches of some rows.

    Runs the model on zeros if `timed`; its state stays as it was.

    Args:
        functional: from `graph_of`.
        rows: of a micro-batch.
        timed: whether to measure seconds.

    Raises:
        ValueError: an input leaves more open than the batch.
    """
    _check_shapes(functional)
    nodes = nodes_of(functional)
    chain = measure_chain(functional, rows)
    seconds = _seconds(functional, nodes, rows) if timed else [(0.0, 0.0)] * len(nodes)
    weights = _own_weights(nodes)
    return Costs(
        names=[node.operation.name for node in nodes],
        parameters=[sum(_count(each) for each in own) for own in weights],
        parameter_bytes=[sum(_count(each) * tf.as_dtype(each.dtype).size for each in own) for own in weights],
        activations=chain.kept,
        across=chain.across,
        forward=[forward for forward, _ in seconds],
        backward=[backward for _, backward in seconds],
    )


def groups_sharing_variables(nodes: Sequence[Any]) -> list[list[int]]:
    """Numbers of the nodes that use the same variable, for each variable that several use."""
    users: dict[int, list[int]] = {}
    for number, node in enumerate(nodes):
        for variable in getattr(node.operation, "variables", ()):
            users.setdefault(id(variable), []).append(number)
    return [numbers for numbers in users.values() if len(numbers) > 1]


def _own_weights(nodes: Sequence[Any]) -> list[list[Any]]:
    seen: set[int] = set()
    found: list[list[Any]] = []
    for node in nodes:
        own = [each for each in getattr(node.operation, "weights", ()) if id(each) not in seen]
        seen.update(id(each) for each in own)
        found.append(own)
    return found


def _seconds(functional: Any, nodes: Sequence[Any], rows: int) -> list[tuple[float, float]]:
    """Of the forward pass, and of the forward and backward pass together, of each node."""
    seen: list[dict[int, Any]] = []

    def after(node: Any, values: dict[int, Any]) -> None:
        seen.append({id(each): values[id(each)] for each in node.input_tensors})

    zeros = [tf.zeros([rows, *each.shape[1:]], each.dtype) for each in functional.inputs]
    inputs = keras.tree.pack_sequence_as(functional._inputs_struct, zeros)
    with _unchanged(functional):
        with node_by_node(functional, after):
            functional(inputs, training=True)
        seconds = [_seconds_of(node, values) for node, values in zip(nodes, seen, strict=True)]
        functional._clear_losses()
    return seconds


def _seconds_of(node: Any, values: dict[int, Any]) -> tuple[float, float]:
    weights = [each._value for each in getattr(node.operation, "trainable_variables", ())]
    keys = list(values)

    def outputs(tensors: Sequence[Any]) -> list[Any]:
        known = dict(zip(keys, tensors, strict=True))
        run_node(node, known, _in_training)
        return [known[id(each)] for each in node.outputs]

    @tf.function(autograph=False)  # type: ignore[untyped-decorator, unused-ignore]
    def forward(tensors: Sequence[Any]) -> Any:
        return outputs(tensors)

    @tf.function(autograph=False)  # type: ignore[untyped-decorator, unused-ignore]
    def both(tensors: Sequence[Any]) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([each for each in tensors if each.dtype.is_floating])
            results = [each for each in outputs(tensors) if each.dtype.is_floating]
        floats = [each for each in tensors if each.dtype.is_floating]
        found = tape.gradient(results, [*floats, *weights])
        return results, [tf.convert_to_tensor(each) for each in found if each is not None]

    @tf.function(autograph=False)  # type: ignore[untyped-decorator, unused-ignore]
    def nothing(tensors: Sequence[Any]) -> Any:
        return [tf.identity(tensors[0])]

    tensors = list(values.values())
    # A small node takes less than to call a function, which a training step does once.
    call = _fastest(lambda: nothing(tensors))
    return (
        max(_fastest(lambda: forward(tensors)) - call, _SHORTEST),
        max(_fastest(lambda: both(tensors)) - call, _SHORTEST),
    )


def _in_training(operation: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if getattr(operation, "_call_has_training_arg", False):
            kwargs = {"training": True, **kwargs}
        return operation(*args, **kwargs)

    return call


def _fastest(run: Callable[[], Any]) -> float:
    run()  # traces
    times = []
    for _ in range(_RUNS):
        start = time.perf_counter()
        for tensor in tf.nest.flatten(run()):
            tensor.numpy()
        times.append(time.perf_counter() - start)
    return min(times)


@contextmanager
def _unchanged(functional: Any) -> Iterator[None]:
    """Puts moving statistics and seeds back."""
    before = [(each, each._value.numpy()) for each in state_of(functional)]
    try:
        yield
    finally:
        for variable, value in before:
            variable._value.assign(value)


def _check_shapes(functional: Any) -> None:
    for each in functional.inputs:
        if any(size is None for size in each.shape[1:]):
            raise ValueError(
                "A pipeline is planned for inputs whose shape is known but for the batch; received an input "
                f"{each.name!r} of shape {tuple(each.shape)}. Give keras.Input the whole shape."
            )


def _count(variable: Any) -> int:
    return int(tf.TensorShape(variable.shape).num_elements() or 0)
