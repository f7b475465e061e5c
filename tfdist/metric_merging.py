"""Metrics of all ranks' data from each rank's metrics: exact, where averages of averages would be wrong.

Problem: each rank's metrics cover its own part of the data. The mean of the ranks' results is wrong as soon as
parts differ in size, and for AUC, precision, recall, IoU, F-scores and R2 even where they don't.

Solution: add up states, not results. Every metric that Keras ships keeps sums (totals, counts, confusion
matrices), so the sum of the ranks' states is the state of one process that saw all data, and the result of that
state is the exact global result. For a metric of the user's own, unless it declares `tfdist_state = "sum"`,
and for values that no metric produced, what remains is the mean weighted by each rank's samples.

States are small and travel over the control channel once per epoch; no tensor is moved.
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

_SUMS = {
    "total", "count", "accumulator", "true_positives", "true_negatives", "false_positives", "false_negatives",
    "total_confusion_matrix", "intermediate_weights", "num_samples", "squared_sum", "sum", "residual",
}  # fmt: skip
"""Names of the state variables of Keras's metrics, all of them sums over samples."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """What one rank has measured.

    Attributes:
        logs: numbers by name.
        states: for each metric of the model, in order, its variables' values; None where they don't add up.
        samples: how many samples the logs cover; 0 if unknown.
    """

    logs: dict[str, float]
    states: list[list[np.ndarray[Any, Any]] | None]
    samples: float

    def to_payload(self) -> dict[str, Any]:
        """JSON values and bytes, for the control channel."""
        return {
            "logs": self.logs,
            "samples": self.samples,
            "states": [
                None if state is None else [_packed(value) for value in state] for state in self.states
            ],
        }

    @classmethod
    def from_payload(cls, payload: dict[str, Any]) -> Measured:
        return cls(
            payload["logs"],
            [None if state is None else [_unpacked(value) for value in state] for state in payload["states"]],
            payload["samples"],
        )


def _packed(value: np.ndarray[Any, Any]) -> list[Any]:
    return [value.dtype.str, list(value.shape), value.tobytes()]


def _unpacked(packed: list[Any]) -> np.ndarray[Any, Any]:
    dtype, shape, data = packed
    return np.frombuffer(data, dtype).reshape(shape)


def measure(model: Any, logs: dict[str, Any]) -> Measured:
    """This rank's state of all metrics of `model`, and the numbers in `logs`."""
    states = [
        [np.asarray(keras.ops.convert_to_numpy(variable)) for variable in metric.variables]
        if adds_up(metric)
        else None
        for metric in _metrics(model)
    ]
    tracker = getattr(model, "_loss_tracker", None)
    samples = 0.0 if tracker is None else float(keras.ops.convert_to_numpy(tracker.count))
    return Measured(numbers_in(logs), states, samples)


def merge(model: Any, ranks: Sequence[Measured]) -> tuple[dict[str, float], list[str]]:
    """Global values of the logs that every rank has; leaves the global state in the model's metrics.

    Args:
        model: the model whose metrics all ranks measured; the same on all ranks.
        ranks: what each rank measured.

    Returns:
        Values by name, and the names of metrics whose states don't add up, so that a mean had to do.
    """
    results = _results_of_sum(model, ranks)
    averaged = [metric.name for metric in _metrics(model) if not adds_up(metric)]
    merged = {}
    for name in ranks[0].logs:
        if not all(name in rank.logs for rank in ranks):
            continue
        plain = any(name == own or name.endswith(f"_{own}") for own in averaged)
        if name in results and not plain:
            merged[name] = results[name]
        else:
            merged[name] = _mean([(rank.logs[name], rank.samples) for rank in ranks])
    return merged, averaged


def adds_up(metric: Any) -> bool:
    """Whether the sum of two states of `metric` is the state of the joint data."""
    if getattr(type(metric), "tfdist_state", None) == "sum":
        return True
    if not any(_is_of_keras(base) for base in type(metric).__mro__):
        return False
    return all(variable.name in _SUMS for variable in metric.variables)


def numbers_in(logs: dict[str, Any]) -> dict[str, float]:
    """The logs that are real numbers."""
    scalars = {name: value for name, value in logs.items() if np.ndim(value) == 0}
    return {
        name: float(value)
        for name, value in scalars.items()
        if isinstance(value, numbers.Real) or keras.ops.is_tensor(value)
    }


def _results_of_sum(model: Any, ranks: Sequence[Measured]) -> dict[str, float]:
    metrics = _metrics(model)
    if any(len(rank.states) != len(metrics) for rank in ranks):
        return {}
    for number, metric in enumerate(metrics):
        states = [rank.states[number] or [] for rank in ranks]
        if any(len(state) != len(metric.variables) for state in states):
            continue
        for place, variable in enumerate(metric.variables):
            values = [state[place] for state in states]
            total = np.sum([np.asarray(value, np.float64) for value in values], axis=0)
            variable.assign(total.astype(values[0].dtype))
    return numbers_in(model.get_metrics_result())


def _metrics(model: Any) -> list[Any]:
    """Every metric of its own state, in an order that is the same on all ranks."""
    found: list[Any] = []

    def visit(metric: Any) -> None:
        parts = getattr(metric, "metrics", None)
        if isinstance(parts, list | tuple):
            for part in parts:
                visit(part)
        elif all(metric is not other for other in found):
            found.append(metric)

    for metric in model.metrics:
        visit(metric)
    return found


def _is_of_keras(cls: type) -> bool:
    """Whether `cls` is one of the metrics that Keras ships, rather than their common base."""
    own = cls.__module__.partition(".")[0] == "keras"
    return own and issubclass(cls, keras.metrics.Metric) and cls is not keras.metrics.Metric


def _mean(weighted: Sequence[tuple[float, float]]) -> float:
    """Mean of (value, weight) pairs; unweighted if no rank knows how many samples it saw."""
    if len({value for value, _ in weighted}) == 1:
        return weighted[0][0]  # a learning rate, say: no rounding
    total = sum(weight for _, weight in weighted)
    if total == 0:
        return sum(value for value, _ in weighted) / len(weighted)
    # A rank without samples has no meaningful value (0 or NaN), whatever its weight.
    return sum(value * weight for value, weight in weighted if weight) / total
