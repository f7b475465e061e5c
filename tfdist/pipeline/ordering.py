"""Backward passes of a stage in the order of the schedule.

Problem: once the loss is known, the backward passes of all micro-batches may start, and TensorFlow starts them
together, so the activations of all of them are alive.

Solution: a token is made of what the stage returned for a micro-batch, and goes into what it gets for the next one.
It carries nothing forward. Backward it is a dependency the other way round: the gradient of the former waits for
that of the latter.

Source: Kim et al. 2020, "torchgpipe: on-the-fly pipeline parallelism for training giant models", fork and join.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.layers.barrier import tie
from tfdist.layers.tensor_leaves import TensorLeaves


def fork(outputs: Sequence[Any]) -> tuple[list[Any], Any]:
    """`outputs`, whose gradients wait for that of the token; and the token, or None if no output has a gradient."""
    leaves = TensorLeaves(list(outputs))
    places = _differentiable(leaves.tensors)
    if not places:
        return list(outputs), None

    @tf.custom_gradient  # type: ignore[untyped-decorator, unused-ignore]
    def forked(*tensors: Any) -> Any:
        def gradient(*of_results: Any) -> Any:
            *of_tensors, of_token = of_results
            return tie([tf.convert_to_tensor(each) for each in of_tensors], [of_token])

        return (*(tf.identity(each) for each in tensors), tf.zeros([])), gradient

    *tensors, token = forked(*(leaves.tensors[place] for place in places))
    return _with(leaves, places, tensors), token


def join(inputs: Sequence[Any], token: Any) -> list[Any]:
    """`inputs`, whose gradients are what the token's waits for."""
    leaves = TensorLeaves(list(inputs))
    places = _differentiable(leaves.tensors)
    if token is None or not places:
        return list(inputs)

    @tf.custom_gradient  # type: ignore[untyped-decorator, unused-ignore]
    def joined(token: Any, *tensors: Any) -> Any:
        def gradient(*of_results: Any) -> Any:
            return (tie([tf.zeros_like(token)], of_results)[0], *of_results)

        return tuple(tf.identity(each) for each in tensors), gradient

    return _with(leaves, places, joined(token, *(leaves.tensors[place] for place in places)))


def _differentiable(tensors: Sequence[Any]) -> list[int]:
    return [place for place, each in enumerate(tensors) if each.dtype.is_floating]


def _with(leaves: TensorLeaves, places: Sequence[int], tensors: Sequence[Any]) -> list[Any]:
    filled = [tf.identity(each) for each in leaves.tensors]
    for place, tensor in zip(places, tensors, strict=True):
        filled[place] = tensor
    result: list[Any] = leaves.filled(filled)
    return result
