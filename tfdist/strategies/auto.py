"""`auto`: of the strategies whose gradients and slots fit into memory, the one that the models call fastest.

Problem: which strategy is best depends on the model, the optimizer, the number of ranks, the network and the free
memory, and a user knows the last three only by trying.

Solution: when the optimizer is built all of that is known. Ranks time a small all-reduce and a large one, tell each
other what memory they have left, and all come to the same choice by `tfdist.cost`. Activations are not known yet:
half of the free memory is left for them. A ring is taken where nothing is faster, so parameter servers come in
where the slots of Adam for all weights don't fit.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist import cost, keras_compat, resources, world
from tfdist.collectives.base import Group, ReduceOp
from tfdist.gradients import GradientReducer
from tfdist.strategies.base import Strategy
from tfdist.strategies.ring import Ring
from tfdist.variables import bytes_of

_SMALL, _LARGE = 1, 1 << 18  # float32 words of the all-reduces that are timed: 4 bytes and 1 MB
_REPEAT = 5
_FOR_STATE = 0.5  # of the free memory; the rest is for activations


@dataclasses.dataclass(frozen=True)
class Circumstances:
    """What decides.

    Attributes:
        ranks: that train together.
        payload: bytes of the trainable weights.
        slots: the optimizer's bytes per byte of weights.
        link: between the ranks.
        free: bytes of memory that each rank can take, in rank order; 0 for unknown.
    """

    ranks: int
    payload: int
    slots: float
    link: cost.Link
    free: Sequence[int]


@dataclasses.dataclass(frozen=True)
class Choice:
    """A strategy, and what the models say of it.

    Attributes:
        name: what the user could have written.
        traffic: of a step.
        needs: bytes of gradients and slots that each rank will keep, in rank order.
    """

    name: str
    traffic: cost.Traffic
    needs: Sequence[float]

    def fits(self, free: Sequence[int]) -> bool:
        """Whether every rank of which it is known has the memory."""
        return all(not room or need <= _FOR_STATE * room for need, room in zip(self.needs, free, strict=True))


def choices(around: Circumstances) -> list[Choice]:
    """What there is to choose from."""
    ranks, payload, link = around.ranks, around.payload, around.link
    ring = cost.ring_memory(payload, slots=around.slots)
    made = [Choice("ring", cost.ring(ranks, payload, link), [ring.total - ring.weights] * ranks)]
    for servers in (ranks, 1):
        server, worker = cost.parameter_server_memory(ranks, payload, servers=servers, slots=around.slots)
        needs = [each.total - each.weights for each in [server] * servers + [worker] * (ranks - servers)]
        traffic = cost.parameter_server(ranks, payload, link, servers=servers)
        made.append(Choice(f"parameter_server(servers={servers})", traffic, needs))
    return made


def choose(around: Circumstances) -> tuple[Choice, str]:
    """The fastest that fits, and the reason; if none fits, the one that needs least.

    Example:
        >>> link = cost.Link(latency=1e-4, bandwidth=1e9)
        >>> adam = Circumstances(4, 10**9, 2.0, link, free=[5 * 10**9] * 4)
        >>> choose(adam)[0].name
        'parameter_server(servers=4)'
    """
    made = choices(around)
    fitting = [each for each in made if each.fits(around.free)]
    if fitting:
        best = min(fitting, key=lambda each: round(each.traffic.seconds, 9))  # of equals the first, a ring
    else:
        best = min(made, key=lambda each: max(each.needs))
    costs = "; ".join(
        f"{each.name} {_megabytes(each.traffic.sent)}, {1e3 * each.traffic.seconds:.1f} ms, "
        f"{_megabytes(max(each.needs))}{'' if each.fits(around.free) else ' (too much)'}"
        for each in made
    )
    least = min((room for room in around.free if room), default=0)
    room = f"{_megabytes(_FOR_STATE * least)}, half of what is free" if least else "an unknown amount"
    return best, (
        f"strategy auto takes {best.name} for {_megabytes(around.payload)} of weights on {around.ranks} ranks"
        f"{'' if fitting else ', the smallest, since none fits'}. By the models, the busiest rank's bytes sent in "
        f"a step, time of the step's communication, and bytes of gradients and slots: {costs}. There is room for "
        f"{room}."
    )


class Auto(Ring):
    """A ring, until the optimizer is built and something else turns out to be better."""

    name = "auto"

    def __init__(self, reducer: GradientReducer, group: Group, *, make: Callable[[str], Strategy]) -> None:
        super().__init__(reducer, group)
        self._make = make

    def settle(self, optimizer: Any, variables: Sequence[Any]) -> Strategy:
        if self.reducer.op is ReduceOp.ADASUM or self.reducer.local_variables:
            return self  # nothing else can
        with tf.init_scope():
            best, why = choose(self._circumstances(optimizer, variables))
        if world.rank() == self.group.ranks[0]:
            print(f"tfdist: {why}", flush=True)
        return self._make(best.name)

    def _circumstances(self, optimizer: Any, variables: Sequence[Any]) -> Circumstances:
        here, ranks = world.current(), self.group.ranks
        assert here.control is not None
        # On a GPU TensorFlow does not say how much there is.
        free = 0 if tf.config.list_physical_devices("GPU") else resources.free_memory()
        mine = {
            "free": free // here.spec.local_size,
            "small": self._seconds(_SMALL),
            "large": self._seconds(_LARGE),
        }
        what = "choosing a strategy"
        told = here.control.exchange(f"{what} on ranks {ranks}", mine, ranks=ranks, describe=what)
        # The slowest has waited for nobody.
        small, large = (max(each[size] for each in told) for size in ("small", "large"))
        link = cost.fitted_link(
            len(ranks), 4 * _LARGE, latency=small, seconds=large, shared=here.spec.cross_size == 1
        )
        return Circumstances(
            len(ranks),
            sum(bytes_of(variable) for variable in variables),
            keras_compat.slots_per_weight(optimizer),
            link,
            [int(each["free"]) for each in told],
        )

    def _seconds(self, words: int) -> float:
        """Of one all-reduce, at best."""
        here = world.current()
        assert here.watchdog is not None
        value, best = tf.zeros([words]), float("inf")
        for turn in range(_REPEAT):
            with here.watchdog.watch("timing an all-reduce for strategy auto", self.group.ranks):
                start = time.perf_counter()
                (total,) = here.engine.allreduce(
                    [value], ReduceOp.SUM, name=f"{self.reducer.name}/auto/{words}/{turn}", group=self.group
                )
                total[0].numpy()
            best = min(best, time.perf_counter() - start)
        return best


def _megabytes(number: float) -> str:
    return f"{number / 2**20:,.1f} MB"
