"""Names of collectives inside `tf.function`: the same on all ranks and after a retrace.

Problem: peers find each other by name. Counters that run with tracing differ between ranks as soon as one
retraces (a ragged last batch), and one name for two collectives mixes their tensors.

Solution: a name says where the call stands: the traced function's name, the caller's file and line, the kind,
and how many of these came before in this trace. Retracing starts at zero again and yields the same name;
control-flow branches and loop bodies, graphs of their own with numbered names, count in the function they
belong to. What a name can't tell apart, the signature (operation, dtype, shape) does: the engines' keys
contain it.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import tensorflow as tf

_COUNTS = "_tfdist_collectives"
_GENERATED = "__autograph_generated_file"
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_FRAMEWORK = os.path.dirname(os.path.abspath(tf.__file__)) + os.sep


def derive_name(kind: str, name: str | None) -> str:
    """Name of a collective that is being traced.

    Args:
        kind: such as `allreduce`.
        name: the user's, made unique within the traced function; None derives one.
    """
    root = _traced_function(tf.compat.v1.get_default_graph())
    base = name or f"{root.name}/{_call_site()}/{kind}"
    counts: dict[str, int] | None = getattr(root, _COUNTS, None)
    if counts is None:
        counts = {}
        setattr(root, _COUNTS, counts)
    number = counts.get(base, 0)
    counts[base] = number + 1
    return f"{base}.{number}" if number else base


def _traced_function(graph: Any) -> Any:
    """The function's graph that a branch's or loop body's graph belongs to."""
    from tensorflow.python.ops import control_flow_v2_func_graphs

    while isinstance(graph, control_flow_v2_func_graphs.ControlFlowFuncGraph):
        graph = graph.outer_graph
    return graph


def _call_site() -> str:
    """File and line of the first caller outside tfdist and TensorFlow."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if os.path.basename(path).startswith(_GENERATED):
            # AutoGraph's file has a random name; its lines are a function of the source.
            return f"{frame.f_code.co_name}:{frame.f_lineno}"
        if not path.startswith((_OWN, _FRAMEWORK)):
            return f"{os.path.basename(path)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "unknown"
