"""The graph inside Functional and Sequential models, run in parts (Keras >= 3.3).

Problem: a part of such a model can't be recomputed as a layer without making another model of it, with other names
and files.

Solution: the model stays. Only the loop over the nodes of its graph (`Function._run_through_graph`) is replaced on
the instance, by one that goes over groups of them.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

# (nodes of a part, its input tensors, ids of its outputs, operation_fn) -> values of the outputs
RunPart = Callable[["Part", Sequence[Any], Callable[[Any], Any]], Sequence[Any]]


_LOOP = "_run_through_graph"


class Part:
    """Consecutive nodes of a graph.

    Attributes:
        layers: those that its nodes call.
        inputs: ids of the symbolic tensors that come from before.
        outputs: ids of those that are needed after.
        recomputes: whether it is one to recompute.
    """

    def __init__(self, nodes: Sequence[Any], needed_after: set[int], *, recomputes: bool) -> None:
        self._nodes = nodes
        self.recomputes = recomputes
        made = {id(tensor) for node in nodes for tensor in node.outputs}
        read = [id(tensor) for node in nodes for tensor in node.input_tensors]
        self.inputs = [tensor for tensor in dict.fromkeys(read) if tensor not in made]
        self.outputs = [id(tensor) for node in nodes for tensor in node.outputs if id(tensor) in needed_after]
        operations = {id(node.operation): node.operation for node in nodes}
        self.layers = [each for each in operations.values() if isinstance(each, keras.layers.Layer)]

    def run(self, inputs: Sequence[Any], operation_fn: Callable[[Any], Any]) -> list[Any]:
        """Values of `outputs` for values of `inputs`."""
        values = dict(zip(self.inputs, inputs, strict=True))
        for node in self._nodes:
            run_node(node, values, operation_fn)
        return [values[tensor] for tensor in self.outputs]


def run_node(node: Any, values: dict[int, Any], operation_fn: Callable[[Any], Any]) -> None:
    """Calls a node's operation, and adds its outputs to `values`."""
    args, kwargs = node.arguments.fill_in(values)
    outputs = operation_fn(node.operation)(*args, **kwargs)
    for symbolic, value in zip(node.outputs, keras.tree.flatten(outputs), strict=True):
        values[id(symbolic)] = value


def graph_of(model: Any) -> Any:
    """The Functional model inside of `model`, or None if it has none."""
    functional = getattr(model, "_functional", model)
    return functional if hasattr(functional, "_nodes_by_depth") else None


def nodes_of(functional: Any) -> list[Any]:
    """The nodes in the order in which they run, without inputs."""
    by_depth = functional._nodes_by_depth
    return [
        node
        for depth in sorted(by_depth, reverse=True)
        for node in by_depth[depth]
        if node.operation and not node.is_input
    ]


def parts_of(functional: Any, bounds: Sequence[int], recomputed: set[int]) -> list[Part]:
    """Parts that end before the nodes numbered `bounds`, the last at the end.

    Args:
        functional: from `graph_of`.
        bounds: ascending; the number of nodes is the last.
        recomputed: numbers of the parts to recompute.
    """
    nodes = nodes_of(functional)
    parts: list[Part] = []
    needed = {id(tensor) for tensor in functional.outputs}
    for number in reversed(range(len(bounds))):
        own = nodes[bounds[number - 1] if number else 0 : bounds[number]]
        parts.insert(0, Part(own, needed, recomputes=number in recomputed))
        needed = needed | {id(tensor) for node in own for tensor in node.input_tensors}
    return parts


def run_in_parts(functional: Any, parts: Sequence[Part], run: RunPart) -> None:
    """From now on the model runs part by part, through `run`."""

    def loop(values: dict[int, Any], operation_fn: Callable[[Any], Any]) -> None:
        for part in parts:
            results = run(part, [values[tensor] for tensor in part.inputs], operation_fn)
            values.update(zip(part.outputs, results, strict=True))

    run_by(functional, parts, loop)


def run_by(functional: Any, parts: Sequence[Part], loop: Callable[..., None]) -> None:
    """From now on the model runs through `loop`, which runs all of `parts`.

    Args:
        functional: from `graph_of`.
        parts: of it.
        loop: gets a dictionary from ids of symbolic tensors to values, which holds the inputs, and adds the
            outputs; and `operation_fn`.
    """
    functional.__dict__[_LOOP] = _Loop(functional, parts, loop)


@contextlib.contextmanager
def node_by_node(functional: Any, after: Callable[[Any, dict[int, Any]], None]) -> Iterator[None]:
    """Inside, `after` is called with each node that has run and the values so far."""

    def loop(values: dict[int, Any], operation_fn: Callable[[Any], Any]) -> None:
        for node in nodes_of(functional):
            run_node(node, values, operation_fn)
            after(node, values)

    before = functional.__dict__.get(_LOOP)
    functional.__dict__[_LOOP] = _Loop(functional, (), loop)
    try:
        yield
    finally:
        del functional.__dict__[_LOOP]
        if before is not None:
            functional.__dict__[_LOOP] = before


class _Loop:
    """Stands in for `_run_through_graph`, but where Keras only infers shapes."""

    def __init__(self, functional: Any, parts: Sequence[Part], loop: Callable[..., None]) -> None:
        self._functional = weakref.ref(functional)
        self.parts = parts
        self._loop = loop

    def __call__(self, inputs: Any, operation_fn: Callable[[Any], Any], **options: Any) -> Any:
        functional: Any = self._functional()
        flat = keras.tree.flatten(inputs)
        if options or any(value is None or keras.backend.is_keras_tensor(value) for value in flat):
            return type(functional)._run_through_graph(functional, inputs, operation_fn, **options)
        values = {id(symbolic): value for symbolic, value in zip(functional.inputs, flat, strict=True)}
        self._loop(values, operation_fn)
        outputs = [values[id(symbolic)] for symbolic in functional.outputs]
        return keras.tree.pack_sequence_as(functional._outputs_struct, outputs)
