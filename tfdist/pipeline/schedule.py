"""Which stage works on which micro-batch, forward or backward, and in which order; pure.

A schedule is one list of units of work for each device. A device does its units in their order, each as soon as its
input is there: a forward unit needs that of the stage before, a backward unit that of the stage after, and the same
stage's forward unit. All else, when a unit starts, how many micro-batches are alive, how long devices idle, follows
from the lists.

Rows are devices, columns are ticks; `2` is the forward unit of micro-batch 2, `(2)` its backward unit.

References: Huang et al. 2019, "GPipe: efficient training of giant neural networks using pipeline parallelism";
Kim et al. 2020, "torchgpipe: on-the-fly pipeline parallelism for training giant models"; Narayanan et al. 2021,
"Efficient large-scale language model training on GPU clusters using Megatron-LM".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple


class Unit(NamedTuple):
    """One stage's work on one micro-batch.

    Attributes:
        stage: of the model, 0-based.
        micro_batch: its number, 0-based.
        backward: whether it is the backward pass.
    """

    stage: int
    micro_batch: int
    backward: bool


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The order of work on every device.

    Attributes:
        stages: number of stages; stage s is on device s modulo the number of devices.
        micro_batches: number of micro-batches.
        orders: for each device the units in the order in which it does them.
    """

    stages: int
    micro_batches: int
    orders: tuple[tuple[Unit, ...], ...]

    def start_times(self, forward: Sequence[float], backward: Sequence[float]) -> dict[Unit, float]:
        """When each unit starts, if every device starts a unit as soon as it can; sending takes no time.

        Args:
            forward: seconds (or ticks) of a forward unit of each stage.
            backward: of a backward unit.

        Raises:
            ValueError: devices wait for each other, so that no order exists.
        """
        ends: dict[Unit, float] = {}
        starts: dict[Unit, float] = {}
        free = [0.0] * len(self.orders)
        done = [0] * len(self.orders)
        moved = True
        while moved:
            moved = False
            for device, order in enumerate(self.orders):
                while done[device] < len(order):
                    unit = order[done[device]]
                    needed = needs(unit, self.stages)
                    if any(each not in ends for each in needed):
                        break
                    starts[unit] = max([free[device], *(ends[each] for each in needed)])
                    lasts = (backward if unit.backward else forward)[unit.stage]
                    free[device] = ends[unit] = starts[unit] + lasts
                    done[device] += 1
                    moved = True
        waiting = [order[count] for order, count in zip(self.orders, done, strict=True) if count < len(order)]
        if waiting:
            raise ValueError(
                f"Each device must get what it waits for; received a schedule in which all wait: {waiting}."
            )
        return starts

    def bubble(self, forward: Sequence[float], backward: Sequence[float]) -> float:
        """Share of the devices' time in which they idle, 0 to 1; arguments as of `start_times`."""
        starts = self.start_times(forward, backward)
        lasts = {unit: (backward if unit.backward else forward)[unit.stage] for unit in starts}
        total = max(start + lasts[unit] for unit, start in starts.items())
        return 1.0 - sum(lasts.values()) / (total * len(self.orders)) if total > 0 else 0.0

    def live(self, stage: int) -> int:
        """The most micro-batches whose activations `stage` keeps at once."""
        alive = most = 0
        for unit in self.orders[stage % len(self.orders)]:
            if unit.stage == stage:
                alive += -1 if unit.backward else 1
                most = max(most, alive)
        return most

    def draw(self) -> str:
        """The clock table, where every unit takes one tick; with several stages on a device, a-z tell which."""
        ticks = [1.0] * self.stages
        starts = self.start_times(ticks, ticks)
        count = int(max(starts.values())) + 1
        chunks = self.stages // len(self.orders)
        rows = []
        for order in self.orders:
            cells = ["."] * count
            for unit in order:
                name = f"{unit.micro_batch}" + (
                    _LETTERS[unit.stage // len(self.orders)] if chunks > 1 else ""
                )
                cells[int(starts[unit])] = f"({name})" if unit.backward else name
            rows.append(cells)
        width = max(len(cell) for row in rows for cell in row)
        return "\n".join(" ".join(cell.center(width) for cell in row).rstrip() for row in rows)


_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def needs(unit: Unit, stages: int) -> list[Unit]:
    """Units whose results `unit` takes."""
    stage, micro_batch, backward = unit
    if not backward:
        return [Unit(stage - 1, micro_batch, False)] if stage > 0 else []
    after = [Unit(stage + 1, micro_batch, True)] if stage + 1 < stages else []
    return [Unit(stage, micro_batch, False), *after]


def naive(stages: int, micro_batches: int = 1) -> Schedule:
    """One device works at a time: model parallel without a pipeline.

    For 3 stages and 2 micro-batches:

         0   .   .   .   .  (0)  1   .   .   .   .  (1)
         .   0   .   .  (0)  .   .   1   .   .  (1)  .
         .   .   0  (0)  .   .   .   .   1  (1)  .   .

    Idle: (S-1)/S of the time.
    """
    _check(stages, micro_batches)
    return _schedule(stages, micro_batches, lambda device: _one_by_one(device, 0, micro_batches))


def gpipe(stages: int, micro_batches: int) -> Schedule:
    """All micro-batches forward, then all backward, the last one first.

    For 3 stages and 4 micro-batches:

         0   1   2   3   .   .   .   .  (3) (2) (1) (0)
         .   0   1   2   3   .   .  (3) (2) (1) (0)  .
         .   .   0   1   2   3  (3) (2) (1) (0)  .   .

    Idle: (S-1)/(M+S-1) of the time. All M micro-batches are alive at once, so stages keep their inputs only, and
    compute activations again. The loss may be any function of the whole batch.
    """
    _check(stages, micro_batches)

    def order(device: int) -> list[Unit]:
        forward = [Unit(device, number, False) for number in range(micro_batches)]
        return [*forward, *(Unit(device, unit.micro_batch, True) for unit in reversed(forward))]

    return _schedule(stages, micro_batches, order)


def one_forward_one_backward(stages: int, micro_batches: int) -> Schedule:
    """1F1B with a flush: once the pipeline is full, every forward unit is followed by a backward one.

    For 3 stages and 4 micro-batches:

         0   1   2   .   .  (0)  3  (1)  .  (2)  .  (3)
         .   0   1   .  (0)  2  (1)  3  (2)  .  (3)  .
         .   .   0  (0)  1  (1)  2  (2)  3  (3)  .   .

    Idle as with `gpipe`; but stage s keeps min(S-s, M) micro-batches alive, not M. The loss must be a mean over
    rows.
    """
    _check(stages, micro_batches)
    return _schedule(
        stages, micro_batches, lambda device: _one_by_one(device, stages - 1 - device, micro_batches)
    )


def interleaved(devices: int, micro_batches: int, chunks: int = 2) -> Schedule:
    """1F1B where every device has several stages: `d`, `d + devices`, and so on.

    For 2 devices with 2 chunks, that is 4 stages, and 4 micro-batches; `a` and `b` are the chunks:

         0a   1a   0b   1b   2a  (0b)  3a  (1b)  2b  (0a)  3b  (1a)  .   (2b)  .   (3b) (2a) (3a)
         .    0a   1a   0b  (0b)  1b  (1b)  2a  (0a)  3a  (1a)  2b  (2b)  3b  (3b) (2a) (3a)  .

    Idle: (D-1)/(v·M+D-1) of the time for D devices with v chunks, as each chunk takes a v-th of the time; for v
    times the transfers. M must be a multiple of D.
    """
    _check(devices, micro_batches)
    if chunks < 1 or micro_batches % devices:
        raise ValueError(
            "The interleaved schedule needs chunks >= 1 and micro-batches that are a multiple of the devices; "
            f"received chunks={chunks}, micro_batches={micro_batches}, devices={devices}. "
            f"Take {-(-micro_batches // devices) * devices} micro-batches."
        )
    total = micro_batches * chunks

    def unit(device: int, number: int, backward: bool) -> Unit:
        group, place = divmod(number, devices * chunks)
        chunk, row = divmod(place, devices)
        chunk = chunks - 1 - chunk if backward else chunk
        return Unit(chunk * devices + device, group * devices + row, backward)

    def order(device: int) -> list[Unit]:
        warm = min(total, (devices - 1 - device) * 2 + (chunks - 1) * devices)
        return _alternate(
            [unit(device, number, False) for number in range(total)],
            [unit(device, number, True) for number in range(total)],
            warm,
        )

    return Schedule(devices * chunks, micro_batches, tuple(tuple(order(device)) for device in range(devices)))


SCHEDULES: Mapping[str, Callable[[int, int], Schedule]] = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
}


def _one_by_one(stage: int, warm: int, micro_batches: int) -> list[Unit]:
    return _alternate(
        [Unit(stage, number, False) for number in range(micro_batches)],
        [Unit(stage, number, True) for number in range(micro_batches)],
        min(warm, micro_batches),
    )


def _alternate(forward: Sequence[Unit], backward: Sequence[Unit], warm: int) -> list[Unit]:
    """`warm` forward units, then forward and backward ones in turn, then what is left of the latter."""
    order = list(forward[:warm])
    for number, unit in enumerate(forward[warm:]):
        order += [unit, backward[number]]
    return [*order, *backward[len(forward) - warm :]]


def _schedule(stages: int, micro_batches: int, order: Callable[[int], list[Unit]]) -> Schedule:
    return Schedule(stages, micro_batches, tuple(tuple(order(device)) for device in range(stages)))


def _check(stages: int, micro_batches: int) -> None:
    if stages < 1 or micro_batches < 1:
        raise ValueError(
            "A schedule needs at least one stage and one micro-batch; received "
            f"stages={stages}, micro_batches={micro_batches}."
        )
