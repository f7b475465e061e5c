"""Runs a part of a Keras model twice, the second time exactly like the first (Keras >= 3.3).

Problem: Keras keeps what a layer's result depends on beside its arguments in global state: values of variables
(weights, moving statistics, seeds of random layers), the call context (`training`), the scope of automatic casts.
`keras.remat` runs a layer again in the backward pass with whatever is there by then: dropout draws another mask,
moving statistics are updated twice, `training` is lost, weights come in float32 under mixed precision, and a weight
may be read after its update.

Solution: two of Keras's own stateless scopes, in which all reads and writes of variables come here.
`RecordingScope` hands out the values of before the first run and keeps back its writes; `ReplayScope` hands out
the same values again and drops the writes. `CallState` puts back the rest.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state, stateless_scope, symbolic_scope

from tfdist.keras_compat import activity_losses

_CALL_CONTEXT = "current_call_ctx"
_AUTOCAST = "autocast_scope"


class VariableNeeded(BaseException):
    """What runs in a scope must run again, with a variable that was not prepared for.

    No Exception: Keras makes new ones with another text of those.

    Attributes:
        variable: the `keras.Variable`.
    """

    def __init__(self, variable: Any) -> None:
        super().__init__(variable.path)
        self.variable = variable


class UnknownVariable(VariableNeeded):
    """A variable is read that the recording does not know."""


class RecordingScope(keras.StatelessScope):  # type: ignore[misc, unused-ignore]
    """For the first run: reads give the values of before it, writes and losses are kept back.

    Attributes:
        losses: what layers added.
        written: variable and its last value, for those that were assigned.

    Args:
        values: the value of every variable that the run may read.
    """

    def __init__(self, values: Sequence[tuple[Any, Any]]) -> None:
        super().__init__(collect_losses=True, initialize_variables=False)
        self.state_mapping = {id(variable): value for variable, value in values}
        self.written: dict[int, tuple[Any, Any]] = {}
        self._graph = _graph()

    def get_current_value(self, variable: Any) -> Any:
        """The value of `variable` in this run."""
        _refuse_inner_function(self._graph, variable)
        if variable._value is None:
            raise ValueError(
                f"What is recomputed can't make variables when it is called; received {_name(variable)}, which "
                "was not there before. Make variables in `build` or `__init__`, and give random layers and "
                "functions a keras.random.SeedGenerator that is an attribute of the layer."
            )
        if id(variable) not in self.state_mapping:
            raise UnknownVariable(variable)
        return self.state_mapping[id(variable)]

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Keeps back what is assigned; later reads see it."""
        variable, value = update
        value = tf.stop_gradient(value)
        if _graph() is not self._graph:
            raise ValueError(
                f"What is recomputed can't assign variables inside a loop or branch of its own; received an "
                f"assignment to {_name(variable)}, as by Dropout or BatchNormalization, inside tf.while_loop or "
                "tf.cond. Recompute the body of the loop instead, or move that layer out of it."
            )
        self.state_mapping[id(variable)] = value
        self.written[id(variable)] = (variable, value)


class ReplayScope(keras.StatelessScope):  # type: ignore[misc, unused-ignore]
    """For the second run: reads give the values of the first, writes are dropped when it is over.

    Args:
        values: as of the recording.
        watch: called with what is assigned to a variable, which is a leaf of differentiation from then on, as it
            is when a tape watches the variable.
    """

    def __init__(self, values: Sequence[tuple[Any, Any]], watch: Callable[[Any, Any], None]) -> None:
        super().__init__(collect_losses=True, initialize_variables=False)
        self.state_mapping = {id(variable): value for variable, value in values}
        self._watch = watch

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Later reads in this run see it."""
        variable, value = update
        value = tf.stop_gradient(value)
        self._watch(variable, value)
        self.state_mapping[id(variable)] = value


class CallState:
    """What Keras keeps in global state while layers are called, but for variables; taken when it is made."""

    def __init__(self) -> None:
        context = global_state.get_global_attribute(_CALL_CONTEXT)
        self._state: Mapping[str, Any] = {
            _CALL_CONTEXT: copy.copy(context),
            _AUTOCAST: global_state.get_global_attribute(_AUTOCAST),
        }
        self._regularizers = activity_losses.current()

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, it is as it was."""
        before = {name: global_state.get_global_attribute(name) for name in self._state}
        _set(self._state)
        try:
            with activity_losses.in_place(self._regularizers):
                yield
        finally:
            _set(before)


def _set(state: Mapping[str, Any]) -> None:
    for name, value in state.items():
        global_state.set_global_attribute(name, value)


def read(variable: Any) -> Any:
    """The value of a `keras.Variable` where we are, not cast."""
    scope = stateless_scope.get_stateless_scope()
    value = scope.get_current_value(variable) if scope is not None else None
    return tf.convert_to_tensor(variable._value) if value is None else value


def add_losses(layer: Any, losses: Sequence[Any]) -> None:
    """`layer.add_loss`, which Functional models refuse, though layers in them have losses."""
    for loss in losses:
        keras.layers.Layer.add_loss(layer, loss)


def is_watched(variable: Any) -> bool:
    """Whether tapes watch it by themselves."""
    return bool(variable._value.trainable)


def is_symbolic() -> bool:
    """Whether Keras only infers shapes, or builds."""
    return bool(symbolic_scope.in_symbolic_scope())


def build_symbolically(call: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Has layers that are called for the first time make their variables, without computing anything."""
    from keras.src.backend import compute_output_spec

    compute_output_spec(call, *args, **kwargs)


def state_of(layer: Any) -> list[Any]:
    """All variables that calling `layer` may read, as far as can be known before: its own, and the global seed."""
    variables = [*layer.variables, *_global_seed()]
    return [variable for variable in variables if variable._value is not None]


def _global_seed() -> list[Any]:
    """The state of Keras's global seed, which is one for each thread, and is made when it is first needed.

    Replicas run in threads of their own, where no variable can be made any more: there it may be missing.
    """
    from keras.src.random.seed_generator import global_seed_generator

    if global_state.get_global_attribute("global_seed_generator") is None:
        if tf.distribute.has_strategy():
            return []
        with tf.init_scope():
            global_seed_generator()
    return [global_seed_generator().state]


def _graph() -> Any:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def _refuse_inner_function(outer: Any, variable: Any) -> None:
    """A tf.function keeps the tensors that it captured in the first run, and would use them in the second."""
    from tensorflow.python.ops import control_flow_v2_func_graphs

    graph = _graph()
    while graph is not outer and isinstance(graph, control_flow_v2_func_graphs.ControlFlowFuncGraph):
        graph = graph.outer_graph
        if outer is None and not isinstance(graph, tf.__internal__.FuncGraph):
            return
    if graph is not outer and isinstance(graph, tf.__internal__.FuncGraph):
        raise ValueError(
            "What is recomputed can't hold a tf.function that uses variables; received one, "
            f"{getattr(graph, 'name', '?')!r}, that reads {_name(variable)}. Remove the inner @tf.function, or "
            "hand it the variable's value as an argument."
        )


def _name(variable: Any) -> str:
    return repr(getattr(variable, "path", variable.name))
