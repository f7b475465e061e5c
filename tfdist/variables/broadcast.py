"""Makes ranks start equal: broadcasts variables, whole models, and random states with a rank's offset.

Ranks first compare what they are about to send, because a collective over different lists of variables would
mix them or wait for ever.

Random states are the one thing that must differ: with equal states, every rank would draw the same dropout
mask for its part of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tfdist import world
from tfdist.operations import grouped_broadcast
from tfdist.process_sets import ProcessSet, global_process_set
from tfdist.variables.listing import (
    agree_on_list,
    array_of,
    bytes_of,
    common_variables,
    describe,
    require_built,
    seed_states,
    tensor_of,
)

_SEED_STRIDE = 0x9E3779B9  # odd, so that multiples stay distinct modulo 2**32

_PACK_BYTES = 32 << 20


def broadcast_variables(
    variables: Sequence[Any],
    root_rank: int = 0,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> None:
    """Gives every rank the root's values; every rank calls it with the same list of variables.

    Works eagerly and inside `tf.function`. Moves about K bytes per rank for K bytes of variables.

    Args:
        variables: `keras.Variable` or `tf.Variable` objects of any numeric dtype.
        root_rank: the rank whose values all get.
        process_set: the ranks that take part; all by default.
        inplace: Horovod's hint; it changes nothing here.

    Raises:
        ValueError: `root_rank` is not among the ranks.
        TypeError: a variable holds strings or other things without bytes.
        CollectiveMismatchError: ranks hold different lists; names the first difference and the rank.
        CollectiveTimeoutError: not every rank called.

    Example:
        >>> import keras, tfdist
        >>> tfdist.init()
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> tfdist.broadcast_variables(model.variables, root_rank=0)
    """
    del inplace
    if root_rank not in process_set.ranks:
        raise ValueError(f"`root_rank` must be one of the ranks {process_set.ranks}. Received: {root_rank}.")
    variables = list(variables)
    described = [describe(variable) for variable in variables]
    if len(process_set.ranks) == 1:
        return
    agree_on_list(described, what="broadcast_variables", ranks=process_set.ranks)
    for chosen in _packs(variables):
        values = grouped_broadcast(
            [tensor_of(variable) for variable in chosen], root_rank, process_set=process_set
        )
        for variable, value in zip(chosen, values, strict=True):
            variable.assign(value)


def broadcast_global_variables(root_rank: int) -> None:
    """Horovod's TensorFlow 1 function; Keras 3 has no global collection of variables, so it always raises."""
    raise NotImplementedError(
        f"broadcast_global_variables({root_rank}) needs TensorFlow 1's global collection of variables, which "
        "Keras 3 does not have. Use `tfdist.broadcast_variables(model.variables, root_rank)` or "
        "`tfdist.callbacks.BroadcastGlobalVariablesCallback(root_rank)`."
    )


def broadcast_model(model: Any, root_rank: int = 0, *, skip: Sequence[Any] = ()) -> None:
    """Gives every rank the root's weights, optimizer slots, iterations, learning rate and loss scale.

    Random states become the root's too, plus each rank's own offset. Every rank calls it.

    Args:
        model: a built `keras.Model`; its optimizer is built if it is not yet.
        root_rank: the rank whose state all get.
        skip: variables that stay as they are on each rank.

    Raises:
        ValueError: the model is not built.
        CollectiveMismatchError: ranks hold different models; names the first difference and the rank.
    """
    require_built(model)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)
    skipped = {id(variable) for variable in skip}
    state = [*model.weights, *common_variables(optimizer)]
    broadcast_variables([variable for variable in state if id(variable) not in skipped], root_rank)
    offset_seeds(model, root_rank)


def offset_seeds(model: Any, root_rank: int = 0) -> None:
    """Makes random states of a model distinct by rank and reproducible: the root's, plus a rank's offset.

    Covers the seed generators of all layers (dropout, augmentation) and Keras's global one. The root's state
    stays as it is. Calling it again changes nothing but to follow the root. Every rank calls it.

    Args:
        model: a built `keras.Model`.
        root_rank: the rank whose state the others derive theirs from.
    """
    here = world.current()
    states = seed_states(model)
    broadcast_variables(states, root_rank)
    shift = (here.spec.rank - root_rank) * _SEED_STRIDE
    for state in states if shift else ():
        value = array_of(state)
        seed = (int(value[0]) + shift) % 2**32 if value.dtype.itemsize == 4 else int(value[0]) + shift
        state.assign(np.array([seed, int(value[1])], dtype=np.int64).astype(value.dtype))


def _packs(variables: Sequence[Any]) -> Iterator[list[Any]]:
    """Runs of variables that are copied at once, so that copies take little memory beside the variables."""
    pack: list[Any] = []
    used = 0
    for variable in variables:
        pack.append(variable)
        used += bytes_of(variable)
        if used >= _PACK_BYTES:
            yield pack
            pack, used = [], 0
    if pack:
        yield pack
