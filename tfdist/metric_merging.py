"""Metrics of all ranks' data from each rank's metrics: exact, where averages of averages would be wrong.

Problem: each rank's metrics cover its own part of the data. The mean of the ranks' results is wrong as soon as
parts differ in size, and for AUC, precision, recall, IoU, F-scores and R2 even where they don't.

Solution: add up states, not results. Every metric that Keras ships keeps sums (totals, counts, confusion
matrices), so the sum of the ranks' states is the state of one process that saw all data, and the result of that
state is the exact global result. A metric of the user's own adds up if it declares `tfdist_state = "sum"`, or if
all its state is that of metrics which do.

What remains is the mean weighted by each rank's samples: metrics that don't add up, and values that no metric
produced, such as a loss that a `train_step` of the user's own returns. Names don't tell which these are, for a
`train_step` may return anything under any name; so a log counts as a metric's if the states of the rank that
wrote it give its value.

A rank that saw no data has no say, and gets the same values as the others. States are small and travel over the
control channel once per epoch; no tensor is moved.
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
        logs: numbers, or nested lists of them, by name.
        states: for each metric of the model, in order, its variables' values; None where they don't add up.
        samples: how many samples the logs cover; 0 if there were none, or nobody counted.
    """

    logs: dict[str, Any]
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
    return [value.dtype.name, list(value.shape), value.tobytes()]


def _unpacked(packed: list[Any]) -> np.ndarray[Any, Any]:
    dtype, shape, data = packed
    return np.frombuffer(data, dtype).reshape(shape)


def measure(model: Any, logs: dict[str, Any]) -> Measured:
    """This rank's state of all metrics of `model`, and the numbers in `logs`."""
    states = [
        [np.asarray(keras.ops.convert_to_numpy(variable)) for variable in metric.variables]
        if adds_up(metric)
        else None
        for metric in own_metrics(model)
    ]
    tracker = getattr(model, "_loss_tracker", None)
    samples = 0.0 if tracker is None else float(keras.ops.convert_to_numpy(tracker.count))
    return Measured(numbers_in(logs), states, samples)


def merge(model: Any, ranks: Sequence[Measured]) -> tuple[dict[str, Any], list[str]]:
    """Global values of the logs that every rank with data has; leaves the global state in the model's metrics.

    Args:
        model: the model whose metrics all ranks measured; the same on all ranks.
        ranks: what each rank measured, in the same order on all ranks.

    Returns:
        Values by name, the same on all ranks, and the names of metrics whose states don't add up, so that a mean
        had to do.
    """
    metrics = own_metrics(model)
    averaged = [metric.name for metric in metrics if not adds_up(metric)]
    summable = [place for place in range(len(metrics)) if _states_match(place, len(metrics), ranks)]
    measuring = _with_data(ranks)
    if not measuring:
        return {}, averaged
    names = [name for name in measuring[0].logs if _have_alike(name, measuring)]

    exact = _written_by_metrics(model, metrics, summable, measuring[0])
    sources = {
        name: _source(metrics, summable, [(rank.logs[name], rank.states) for rank in measuring])
        for name in names
        if name not in exact
    }
    for place in summable:
        _assign(metrics[place], _sum([rank.states[place] or [] for rank in measuring]))
    results = _results(model, metrics, summable)

    merged: dict[str, Any] = {}
    for name in names:
        source = sources.get(name)
        if name in exact:
            merged[name] = results[name]
        elif source is not None:
            merged[name] = numbers_in({name: source.result()})[name]
        else:
            merged[name] = _mean([(rank.logs[name], rank.samples) for rank in measuring])
        if isinstance(merged[name], list):
            merged[name] = np.asarray(merged[name], np.float32)
    return merged, averaged


def merge_into(logs: dict[str, Any], model: Any, payloads: Sequence[dict[str, Any]]) -> list[str]:
    """Makes `logs` those of all ranks' data; returns what `merge` says had to be averaged.

    Args:
        logs: changed in place.
        model: as for `merge`.
        payloads: what every rank's `Measured.to_payload` gave, in order of ranks.
    """
    merged, averaged = merge(model, [Measured.from_payload(payload) for payload in payloads])
    logs.update(merged)
    return averaged


def averaged_notice(name: str) -> str:
    """What the user is told about a metric whose states don't add up."""
    return (
        f"metric {name!r} is not one of Keras's, so its value is the mean of the ranks' values, weighted "
        'by their samples. If its state variables are sums over samples, set `tfdist_state = "sum"` on '
        "its class, and it is exact."
    )


def adds_up(metric: Any) -> bool:
    """Whether the sum of two states of `metric` is the state of the joint data."""
    if getattr(type(metric), "tfdist_state", None) == "sum":
        return True
    if any(_is_of_keras(base) for base in type(metric).__mro__):
        return all(variable.name in _SUMS for variable in metric.variables)
    parts = getattr(metric, "_metrics", [])
    own = len(metric.variables) - sum(len(part.variables) for part in parts)
    return bool(parts) and own == 0 and all(adds_up(part) for part in parts)


def numbers_in(logs: dict[str, Any]) -> dict[str, Any]:
    """The logs that are real numbers, as floats, or arrays of them, as nested lists; dicts are flattened."""
    found: dict[str, Any] = {}
    for name, value in logs.items():
        if isinstance(value, dict):
            found |= numbers_in(value)
        elif isinstance(value, numbers.Real):
            found[name] = float(value)
        elif keras.ops.is_tensor(value) or isinstance(value, np.ndarray):
            array = np.asarray(keras.ops.convert_to_numpy(value))
            if array.dtype.kind in "fiub":
                found[name] = array.astype(np.float64).tolist()
    return found


def _with_data(ranks: Sequence[Measured]) -> list[Measured]:
    """Ranks whose logs mean something; where nobody counts samples, those that have logs."""
    counted = [rank for rank in ranks if rank.samples]
    return counted or [rank for rank in ranks if rank.logs]


def _have_alike(name: str, ranks: Sequence[Measured]) -> bool:
    shapes = {np.shape(rank.logs[name]) if name in rank.logs else None for rank in ranks}
    return len(shapes) == 1 and None not in shapes


def _states_match(place: int, count: int, ranks: Sequence[Measured]) -> bool:
    if any(len(rank.states) != count for rank in ranks):
        return False
    states = [rank.states[place] for rank in ranks]
    shapes = [None if state is None else [value.shape for value in state] for state in states]
    return shapes[0] is not None and all(shape == shapes[0] for shape in shapes)


def _written_by_metrics(model: Any, metrics: list[Any], summable: list[int], rank: Measured) -> set[str]:
    """Names of the logs that are results of the metrics of those names, or of a method that combines them."""
    for place in summable:
        _assign(metrics[place], rank.states[place] or [])
    results = _results(model, metrics, summable)
    return {name for name, value in rank.logs.items() if name in results and _equal(results[name], value)}


def _source(metrics: list[Any], summable: list[int], logs: list[tuple[Any, Any]]) -> Any:
    """The metric that gives every rank's log, which a `train_step` returned under another name, if there is one.

    Args:
        metrics: the model's metrics.
        summable: places of those whose states add up.
        logs: each rank's log and states.
    """
    for place in summable:
        metric = metrics[place]
        for value, states in logs:
            _assign(metric, states[place])
            if not _equal(numbers_in({"result": metric.result()}).get("result"), value):
                break
        else:
            return metric
    return None


def _equal(left: Any, right: Any) -> bool:
    if left is None or right is None or np.shape(left) != np.shape(right):
        return False
    return bool(np.allclose(left, right, rtol=1e-5, atol=1e-7, equal_nan=True))


def _results(model: Any, metrics: list[Any], summable: list[int]) -> dict[str, Any]:
    """Results of the metrics whose states add up, under the names that the model gives them.

    The others say NaN, so that a result to which one of them contributes equals no log.
    """
    silenced = [metric for place, metric in enumerate(metrics) if place not in summable]
    for metric in silenced:
        metric.result = lambda: float("nan")
    try:
        return numbers_in(model.get_metrics_result())
    finally:
        for metric in silenced:
            del metric.result


def _sum(states: list[list[np.ndarray[Any, Any]]]) -> list[np.ndarray[Any, Any]]:
    return [
        np.sum([np.asarray(value, np.float64) for value in values], axis=0).astype(values[0].dtype)
        for values in zip(*states, strict=True)
    ]


def _assign(metric: Any, state: list[np.ndarray[Any, Any]]) -> None:
    for variable, value in zip(metric.variables, state, strict=True):
        variable.assign(value)


def own_metrics(model: Any) -> list[Any]:
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


def _mean(weighted: Sequence[tuple[Any, float]]) -> Any:
    """Mean of (value, weight) pairs; unweighted if no rank knows how many samples it saw."""
    values = [value for value, _ in weighted]
    if all(value == values[0] for value in values):
        return values[0]  # a learning rate, say: no rounding
    weights = [weight for _, weight in weighted]
    mean = np.average(np.asarray(values), axis=0, weights=weights if sum(weights) else None)
    result: Any = mean.tolist()
    return result
