"""`recompute_model`: cuts a whole model into blocks that are recomputed, by number, by memory or by name.

Problem: `recompute` leaves the choice of the blocks to the user, and a model may be one flat graph without blocks.

Solution: nodes of the graph are weighed (`kept_bytes`), cut where little crosses (`cuts`), and run block by block
(`keras_compat.functional_graphs`). The model object, its layers and its files stay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_compat.functional_graphs import Part, graph_of, parts_of, run_in_parts
from tfdist.keras_compat.replay_scopes import add_losses
from tfdist.layers import cuts, least_work
from tfdist.layers.decorating import is_recorded
from tfdist.layers.kept_bytes import measure_chain
from tfdist.layers.memory_sizes import bytes_of_text
from tfdist.layers.recomputing import recompute
from tfdist.layers.replay import replay


def recompute_model(
    model: Any,
    blocks: str | int | Sequence[str] | None = None,
    *,
    memory: str | int | None = None,
    batch_size: int | None = None,
) -> Any:
    """Cuts a model into blocks that compute their activations again in the backward pass; see `recompute`.

    Functional and built Sequential models are cut between the nodes of their outermost graph, at places where
    little memory crosses. The model is changed in place, and trains as before: same names, variables and files. A
    loaded or cloned model isn't cut any more: cut it again. Cutting again replaces the cuts.

    Args:
        model: a Functional or built Sequential model; any model for names of layers.
        blocks: "sqrt", the default, for the least memory, which for a chain of n equal layers means about √n
            blocks; a number of blocks; or names of layers of the model that become blocks.
        memory: instead, what training may take, in bytes or as "4GB", "512MiB": weights, gradients, slots of the
            optimizer (of Adam, if the model isn't compiled) and activations. Recomputes no more than it takes.
            Measured in the traced graph; what TensorFlow itself and the input pipeline take comes on top.
        batch_size: rows of a batch, for `memory`.

    Returns:
        `model`.

    Raises:
        TypeError: no model, or one without a graph to cut.
        ValueError: arguments that contradict each other, unknown names, or a budget below the least possible.

    Example:
        >>> import keras, tfdist
        >>> hidden = [keras.layers.Dense(32, activation="relu") for _ in range(16)]
        >>> model = keras.Sequential([keras.Input((32,)), *hidden, keras.layers.Dense(1)])
        >>> model = tfdist.layers.recompute_model(model, blocks="sqrt")

    Reference:
        Chen, Xu, Zhang, Guestrin 2016, "Training deep nets with sublinear memory cost"; Jain et al. 2020,
        "Checkmate: breaking the memory wall with optimal tensor rematerialization".
    """
    if not isinstance(model, keras.Model):
        raise TypeError(f"recompute_model takes a keras.Model; received {model!r}. For a layer: recompute.")
    if (memory is None) != (batch_size is None) or (memory is not None and blocks is not None):
        raise ValueError(
            "recompute_model takes either `blocks`, or `memory` and `batch_size` together; received "
            f"blocks={blocks!r}, memory={memory!r}, batch_size={batch_size!r}."
        )
    if isinstance(blocks, Sequence) and not isinstance(blocks, str):
        _recompute_named(model, blocks)
    else:
        functional = graph_of(model)
        if functional is None:
            raise TypeError(
                f"recompute_model cuts Functional and built Sequential models; received {type(model).__name__} "
                f"{model.name!r}. Build it first, or give names of layers, or put @tfdist.layers.recompute on "
                "the classes of its blocks."
            )
        plan = _plan(model, functional, blocks, memory, batch_size)
        _cut(model, functional, plan)
    model.train_function = None  # one that was traced runs the model as it was
    return model


def _plan(
    model: Any, functional: Any, blocks: str | int | None, memory: str | int | None, batch_size: int | None
) -> cuts.Plan:
    chain = measure_chain(functional, batch_size or 1)
    if memory is not None:
        budget = bytes_of_text(memory)
        fixed = _bytes_of_state(model)
        plan = least_work.within(chain, budget - fixed)
        if plan is None:
            least = fixed + cuts.least_memory(chain).peak
            raise ValueError(
                f"Recomputation brings {model.name!r} with a batch of {batch_size} down to {least:,} bytes, of "
                f"which {fixed:,} are weights, gradients and the optimizer's slots; received memory={memory!r}. "
                "Give more, or a smaller batch, or split the batch, too: tfdist.layers.accumulate_gradients."
            )
        return plan
    if blocks is None or blocks == "sqrt":
        return cuts.least_memory(chain)
    if isinstance(blocks, int) and not isinstance(blocks, bool) and blocks >= 1:
        return cuts.in_blocks(chain, blocks)
    raise ValueError(
        f'`blocks` is "sqrt", a number of blocks from 1 on, or a list of names of layers; received {blocks!r}.'
    )


def _cut(model: Any, functional: Any, plan: cuts.Plan) -> None:
    parts = parts_of(functional, plan.ends, set(plan.recomputed))

    def run(part: Part, inputs: Sequence[Any], operation_fn: Callable[[Any], Any]) -> Sequence[Any]:
        if not part.recomputes or not is_recorded():
            return part.run(inputs, operation_fn)
        outputs, losses = replay(
            model, lambda *inputs: part.run(inputs, operation_fn), inputs, {}, layers=part.layers
        )
        add_losses(model, losses)
        result: Sequence[Any] = outputs
        return result

    run_in_parts(functional, parts, run)


def _recompute_named(model: Any, names: Sequence[str]) -> None:
    layers = {layer.name: layer for layer in model._flatten_layers(include_self=False)}
    unknown = [name for name in names if name not in layers]
    if unknown or not names:
        raise ValueError(
            f"`blocks` must name layers of {model.name!r}; received {list(names)!r}, of which {unknown!r} are "
            f"none. There are: {', '.join(layers) or 'none yet; build the model first'}."
        )
    for name in names:
        recompute(layers[name])


def _bytes_of_state(model: Any) -> int:
    """Weights, gradients and slots."""
    optimizer = getattr(model, "optimizer", None)
    trainable = sum(_size(variable) for variable in model.trainable_variables)
    if optimizer is not None and optimizer.built:
        slots = sum(_size(variable) for variable in optimizer.variables)
    else:
        slots = 2 * trainable
    return sum(_size(variable) for variable in model.variables) + trainable + slots


def _size(variable: Any) -> int:
    return int(tf.TensorShape(variable.shape).num_elements() or 0) * int(tf.as_dtype(variable.dtype).size)
