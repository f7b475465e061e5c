"""Synchronous parameter server: each variable is updated by the one rank that keeps it.

    worker ── gradients ──> owner: sum, clip, update ── values ──> worker

A step of N ranks for K bytes of gradients: with one server, the classical parameter server (Li et al. 2014), the
server receives and sends (N-1)·K, every other rank K. With N servers each rank receives and sends 2(N-1)/N·K, as in
a ring, but keeps only 1/N of the optimizer's slots (as in stage 1 of ZeRO, Rajbhandari et al. 2020). Servers train
on their own data as well, unless they are dedicated: then they take part in each step without data (`joint_step`).
The step is synchronous, so it equals one process with the global batch.

Owners need two numbers that no owner has alone: the norm of all gradients, where `global_clipnorm` is set, and
whether all gradients are finite, where the loss is scaled. Both are summed over the ranks, if needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import graph_watch, keras_compat, world
from tfdist.collectives.base import Group, ReduceOp
from tfdist.errors import TfdistError
from tfdist.gradients import GradientReducer, scale
from tfdist.joint_step import values_of, with_values
from tfdist.strategies.base import Apply, Gradients, Strategy
from tfdist.strategies.ownership import assign_owners
from tfdist.strategies.served_loss import ServedLoss
from tfdist.strategies.shards import Shards
from tfdist.variables import bytes_of, tensor_of

_SAVING = "saving the optimizer's state"


class ParameterServer(Strategy):
    """Sends gradients to the owners of their variables, and gets the new values back.

    Args:
        reducer: combines gradients.
        group: the ranks that train together.
        servers: how many of them, from the first on, own variables.
        dedicated: whether these only update, and compute no gradients.
        server_loss: whether the first one computes one loss of all ranks' outputs.
    """

    name = "parameter_server"

    def __init__(
        self,
        reducer: GradientReducer,
        group: Group,
        *,
        servers: int = 1,
        dedicated: bool = False,
        server_loss: bool = False,
    ) -> None:
        super().__init__(reducer, group)
        if reducer.op is ReduceOp.ADASUM:
            raise TfdistError(
                "op=tfdist.Adasum combines whole gradients on every rank, which parameter servers never see. Use "
                'tfdist.Average, or strategy="ring".'
            )
        self._servers = group.ranks[:servers]
        self._served_loss = ServedLoss(f"{reducer.name}/loss", group) if server_loss else None
        self._owners: dict[int, int] = {}
        self._stand_ins: dict[int, Any] = {}
        self._loaded: dict[int, Any] = {}
        self._zero: Any = None
        self._shards = Shards(self._owner_of, bucket_bytes=reducer.bucket_bytes)
        reducer.transport = self._shards

    @classmethod
    def check(cls, ranks: int, **options: Any) -> None:
        unknown = set(options) - {"servers", "dedicated", "server_loss"}
        if unknown:
            raise TfdistError(
                "parameter_server takes servers=k, dedicated=True or False, and server_loss=True or False; "
                f"received {', '.join(sorted(unknown))}."
            )
        for name in ("dedicated", "server_loss"):
            if not isinstance(options.get(name, False), bool):
                raise TfdistError(
                    f"parameter_server({name}=...) is True or False; received {options[name]!r}."
                )
        servers, alone = options.get("servers", 1), options.get("dedicated", False)
        if not isinstance(servers, int) or isinstance(servers, bool) or servers < 1:
            raise TfdistError(f"parameter_server(servers=k) needs an integer k >= 1; received {servers!r}.")
        # A script that is run alone just trains.
        if ranks > 1 and servers > ranks - alone:
            raise TfdistError(
                f"parameter_server(servers=k) needs k <= {ranks - alone} among {ranks} ranks"
                f"{', of which one must be left to compute gradients' if alone else ''}; received {servers}. Start "
                "more ranks, or take fewer servers."
            )

    @classmethod
    def dedicated(cls, **options: Any) -> int:
        return int(options.get("servers", 1)) if options.get("dedicated") else 0

    def build(self, optimizer: Any, variables: Sequence[Any]) -> None:
        owners = assign_owners([bytes_of(variable) for variable in variables], len(self._servers))
        for variable, owner in zip(variables, owners, strict=True):
            self._owners[id(variable)] = self._servers[owner]
            self._stand_ins[id(variable)] = keras_compat.stand_in(variable)
        stand_ins = [self._stand_ins[id(variable)] for variable in variables]
        mine = [
            variable if self._shards.is_mine(variable) else tiny
            for variable, tiny in zip(variables, stand_ins, strict=True)
        ]
        keras_compat.build_partially(optimizer, mine, stand_ins)

    def update(
        self,
        gradients: Gradients,
        variables: Sequence[Any],
        apply: Apply,
        *,
        optimizer: Any,
        weighed_by: Any = None,
    ) -> Any:
        sums = self.reducer.reduce(gradients, variables, weighed_by=weighed_by)
        updated = [
            (gradient, variable)
            for gradient, variable in zip(sums, variables, strict=True)
            if gradient is not None and self._shards.is_mine(variable)
        ]
        updated += self._placeholders(gradients, variables, optimizer, needed=not updated)
        mine, of = [gradient for gradient, _ in updated], [variable for _, variable in updated]
        name = self.reducer.name_of(gradients, variables)
        if keras_compat.loss_scaler(optimizer) is not None:
            mine = self._spoil_unless_finite(mine, f"{name}/finite")

        def clip(gradients: Sequence[Any], limit: float) -> list[Any]:
            squares = [tf.reduce_sum(tf.square(tf.cast(values_of(each), tf.float32))) for each in gradients]
            norm = tf.sqrt(self._sum(tf.add_n(squares), f"{name}/norm"))
            return [scale(each, limit / tf.maximum(norm, limit)) for each in gradients]

        with keras_compat.clipping_by(optimizer, clip):
            apply(mine, of)
        self._pull(variables, name, after=[values_of(each) for each in gradients if each is not None])
        return None

    @property
    def served_loss(self) -> Any:
        return self._served_loss

    @property
    def divides_state(self) -> bool:
        return True

    def gather(self, variables: Sequence[Any]) -> list[Any]:
        mine = [place for place, each in enumerate(variables) if keras_compat.kept_here(each)]
        values: list[Any] = [None] * len(variables)
        if world.rank() == self.group.ranks[0]:
            values = [np.asarray(tensor_of(each)) for each in variables]
        if len(self._servers) > 1:
            for place, value in self._shards.gather(variables, mine, group=self.group, what=_SAVING):
                values[place] = np.asarray(value)
        return values

    def written(self) -> None:
        if len(self._servers) > 1:
            self._shards.tell("having saved", None, group=self.group)

    def leave(self, failure: str) -> bool:
        return len(self._servers) > 1 and self._shards.leave(_SAVING, failure, group=self.group)

    def restore(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        for variable, value in zip(variables, values, strict=True):
            if keras_compat.kept_here(variable) is False:
                self._loaded[id(variable)] = np.asarray(value)
            else:
                variable.assign(value)

    def spread(self, variables: Sequence[Any], root: int) -> None:
        if len(self._servers) == 1 or root not in self.group.ranks:
            return
        mine = [place for place, each in enumerate(variables) if keras_compat.kept_here(each)]
        loaded = {
            place: self._loaded[id(each)] for place, each in enumerate(variables) if id(each) in self._loaded
        }
        for place, value in self._shards.spread(
            variables, mine, loaded, root, group=self.group, what="restoring the optimizer's state"
        ):
            variables[place].assign(value)
        self._loaded = {}

    def finalize(self, optimizer: Any, variables: Sequence[Any]) -> None:
        for each in keras_compat.innermost(optimizer):
            each.finalize_variable_values(each._trainable_variables)
            if each.use_ema:
                self._pull(variables, f"{self.reducer.name}.finalize")

    def _owner_of(self, variable: Any) -> int:
        return self._owners[id(variable)]

    def _placeholders(
        self, gradients: Gradients, variables: Sequence[Any], optimizer: Any, *, needed: bool
    ) -> list[tuple[Any, Any]]:
        """Stand-ins with zeros as gradients: by an update of them the counters of an optimizer go on.

        A rank that owns nothing needs one; an optimizer that is made of several needs some in each.
        """
        several = len(keras_compat.innermost(optimizer)) > 1
        tiny = [
            self._stand_ins[id(variable)]
            for gradient, variable in zip(gradients, variables, strict=True)
            if gradient is not None and not self._shards.is_mine(variable)
        ]
        chosen = tiny if several else tiny[:1] if needed else []
        if chosen and self._zero is None:
            with tf.init_scope():
                self._zero = tf.Variable(0.0, trainable=False, name="zero")
        # Not constants, on which a graph would begin before it has its data.
        with tf.control_dependencies([values_of(each) for each in gradients if each is not None]):
            return [
                (tf.fill(each.shape, tf.cast(self._zero.read_value(), each.dtype)), each) for each in chosen
            ]

    def _spoil_unless_finite(self, gradients: Sequence[Any], name: str) -> list[Any]:
        """Makes gradients NaN on all ranks if they are infinite or NaN on one: all skip the step."""
        finite = [tf.reduce_all(tf.math.is_finite(values_of(gradient))) for gradient in gradients]
        spoiled = self._sum(tf.cast(tf.logical_not(tf.reduce_all(tf.stack(finite))), tf.float32), name) > 0.0
        spoil = tf.where(spoiled, float("nan"), 0.0)
        return [with_values(each, values_of(each) + tf.cast(spoil, each.dtype)) for each in gradients]

    def _sum(self, value: Any, name: str) -> Any:
        (total,) = world.current().engine.allreduce([value], ReduceOp.SUM, name=name, group=self.group)
        return total

    def _pull(self, variables: Sequence[Any], name: str, *, after: Sequence[Any] = ()) -> None:
        what, watchdog = f"{name}/values", world.current().watchdog
        assert watchdog is not None
        if tf.executing_eagerly() and not watchdog.watching:
            with watchdog.watch(what, self.group.ranks):
                self._shards.pull(variables, name=name, group=self.group, after=after)
            return
        watched = graph_watch.enter(what, [], self.group.ranks)[1]
        self._shards.pull(variables, name=name, group=self.group, after=after)
        if watched:
            graph_watch.leave(what, [])
