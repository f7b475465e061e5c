"""Asynchronous parameter server: workers compute gradients of batches of their own, and nobody waits for all.

    chief ── batch ──> worker ── gradients ──> server <── "apply them" ── chief

Workers read the weights from the servers as they are, so a gradient may be applied to weights that other workers
have moved on since (Dean et al. 2012, "Large Scale Distributed Deep Networks"). A worker that is slow costs its own
share of the speed only. `tfdist.asynchronous` runs the steps; this class is what the optimizer sees of it, on the
chief: one gradient at a time, of one batch, as if it were alone.

What combines gradients of several ranks, or of several passes, has no meaning here and is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfdist.collectives.base import Group, ReduceOp
from tfdist.errors import TfdistError
from tfdist.gradients import GradientReducer
from tfdist.strategies import placed
from tfdist.strategies.asynchronous_roles import NAME, check_options
from tfdist.strategies.ring import Ring


class AsyncParameterServer(Ring):
    """A ring of one: applies the gradients of one worker's batch to the variables on the servers."""

    name = NAME

    def __init__(self, reducer: GradientReducer, group: Group) -> None:
        super().__init__(reducer, group)
        if tf.distribute.get_strategy() is not placed.distribution():
            raise TfdistError(
                f"Under strategy {NAME} the servers keep model and optimizer, so both are made in tfdist.scope(); "
                "received an optimizer made outside. Write `with tfdist.scope():` around the lines that make the "
                "model, the optimizer and compile()."
            )
        for given, what in (
            (reducer.op is not ReduceOp.AVERAGE, f"op={reducer.op}"),
            (reducer.compression is not None, "compression"),
            (reducer.group is not None, "process_set"),
            (reducer.predivide_factor != 1.0, f"gradient_predivide_factor={reducer.predivide_factor}"),
        ):
            _refuse(given, what)

    @classmethod
    def check(cls, ranks: int, **options: Any) -> None:
        check_options(ranks, **options)

    @classmethod
    def dedicated(cls, **options: Any) -> int:
        return 1 + int(options.get("servers", 1))

    def refuse(self, arguments: Mapping[str, Any]) -> None:
        passes = arguments["backward_passes_per_step"]
        _refuse(passes != 1, f"backward_passes_per_step={passes}")


def _refuse(given: bool, what: str) -> None:
    if given:
        raise TfdistError(
            f"{what} is for strategies in which ranks combine their gradients; under {NAME} each batch is an "
            'update of its own. Leave it out, or use strategy="ring".'
        )
