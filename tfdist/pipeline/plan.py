"""Which layers are on which stage, and what that costs: made from a model, and printed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tfdist.keras_compat.functional_graphs import nodes_of
from tfdist.pipeline.costs import Costs, groups_sharing_variables, measure
from tfdist.pipeline.partition import best_cut, boundaries_inside
from tfdist.pipeline.pins import pin_of
from tfdist.pipeline.schedule import Schedule

_BALANCES = ("time", "memory", "parameters")
_DRAWN = 100  # columns that a clock table may have to be shown


@dataclasses.dataclass(frozen=True)
class Stage:
    """A run of consecutive layers.

    Attributes:
        layers: names of layers and operations.
        parameters: number of weights.
        activations: bytes that training keeps of a micro-batch, while the stage computes it.
        sent: bytes of a micro-batch that go on to the next stage, skip connections included.
        forward: seconds of a micro-batch, 0 if not measured.
        backward: seconds, with recomputation.
    """

    layers: tuple[str, ...]
    parameters: int
    activations: int
    sent: int
    forward: float
    backward: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a model is cut.

    Attributes:
        ends: for each stage the number of the node after it.
        stages: what is on them.
        schedule: the order of their work.
    """

    ends: tuple[int, ...]
    stages: tuple[Stage, ...]
    schedule: Schedule

    @property
    def bubble(self) -> float:
        """Share of the devices' time in which they idle, by measured times, or for equal stages."""
        forward = [each.forward for each in self.stages]
        backward = [each.backward for each in self.stages]
        if not any(forward):
            forward, backward = [1.0] * len(forward), [3.0] * len(backward)
        return self.schedule.bubble(forward, backward)

    def __str__(self) -> str:
        head = ("stage", "parameters", "activations", "sent on", "forward", "backward", "layers")
        rows = [head, *(_row(number, each) for number, each in enumerate(self.stages))]
        widths = [max(len(row[column]) for row in rows) for column in range(len(head) - 1)]
        lines = [
            "  ".join([*(cell.rjust(width) for cell, width in zip(row, widths, strict=False)), row[-1]])
            for row in rows
        ]
        timed = any(each.forward for each in self.stages)
        how = "by the measured times" if timed else "for equal stages"
        lines.append(
            f"{self.schedule.micro_batches} micro-batches; devices idle {self.bubble:.0%} of the time, {how}."
        )
        drawing = self.schedule.draw()
        if len(drawing.splitlines()[0]) <= _DRAWN:
            lines.append(drawing)
        return "\n".join(lines)


def make_plan(functional: Any, schedule: Schedule, balance: str | Sequence[str], rows: int) -> Plan:
    """Cuts a model for a schedule.

    Args:
        functional: from `graph_of`.
        schedule: whose stages to fill.
        balance: "time", "memory", "parameters"; or names of the layers with which stages 1, 2, ... begin.
        rows: of a micro-batch, for what is measured.

    Raises:
        ValueError: an unknown balance, or no possible cut.
    """
    given = not isinstance(balance, str)
    if not given and balance not in _BALANCES:
        raise ValueError(
            f"`balance` is one of {', '.join(map(repr, _BALANCES))}, or a list with the name of the first layer of "
            f"each stage but the first; received {balance!r}."
        )
    nodes = nodes_of(functional)
    uncut = boundaries_inside(groups_sharing_variables(nodes))
    pins = {number: pin for number, node in enumerate(nodes) if (pin := pin_of(node.operation)) is not None}
    if given:
        ends = _given_cut([node.operation.name for node in nodes], schedule.stages, balance, uncut)
        pins = {}
        costs = measure(functional, rows, timed=False)
    else:
        # A cut that can't be is refused before anything is measured.
        best_cut([1.0] * len(nodes), schedule.stages, uncut=uncut, pins=pins)
        costs = measure(functional, rows, timed=balance == "time")
        ends = best_cut(costs.by(str(balance)), schedule.stages, across=costs.across, uncut=uncut, pins=pins)
    return Plan(ends, tuple(_stages(costs, ends)), schedule)


def _given_cut(names: Sequence[str], stages: int, balance: Sequence[str], uncut: set[int]) -> tuple[int, ...]:
    unknown = [name for name in balance if name not in names]
    starts = [names.index(name) for name in balance if name in names]
    if unknown or len(starts) != stages - 1 or starts != sorted({*starts} - {0}):
        raise ValueError(
            f"A given cut names the first layer of each stage but the first, {stages - 1} in the order in which "
            f"they run; received balance={list(balance)!r}, of which {unknown!r} are unknown. They run in the "
            f"order {', '.join(names)}."
        )
    parted = sorted(uncut & set(starts))
    if parted:
        raise ValueError(
            "Layers that share variables stay on one stage; received a cut between them at "
            f"{', '.join(names[start] for start in parted)}. Cut before or after all of them."
        )
    return (*starts, len(names))


def _stages(costs: Costs, ends: Sequence[int]) -> list[Stage]:
    return [
        Stage(
            layers=tuple(costs.names[start:end]),
            parameters=sum(costs.parameters[start:end]),
            activations=sum(costs.activations[start:end]),
            sent=costs.across[end - 1] if end < len(costs.names) else 0,
            forward=sum(costs.forward[start:end]),
            backward=sum(costs.backward[start:end]),
        )
        for start, end in zip([0, *ends[:-1]], ends, strict=True)
    ]


def _row(number: int, stage: Stage) -> tuple[str, ...]:
    layers = ", ".join(stage.layers)
    if len(stage.layers) > 4:
        layers = f"{stage.layers[0]}, ..., {stage.layers[-1]} ({len(stage.layers)})"
    times = [
        f"{1e3 * seconds:.2f} ms" if stage.forward else "-" for seconds in (stage.forward, stage.backward)
    ]
    return (
        str(number),
        f"{stage.parameters:,}",
        f"{stage.activations:,} B",
        f"{stage.sent:,} B",
        *times,
        layers,
    )
