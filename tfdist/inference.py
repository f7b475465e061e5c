"""`evaluate` and `predict` of all ranks together: each takes a share of the data, all get the whole result.

Problem: `model.evaluate(shard)` measures a rank's shard, and `model.predict(shard)` predicts it, in an order that
is nobody's. Averages of such metrics are wrong, and putting rows back in order is for each script to invent.

Solution: `evaluate` adds up the states of metrics (`metric_merging`). `predict` deals out whole batches, the same
that one process would make, so that results equal one process's to the last bit; each rank keeps, for every row,
its place in the whole, and rows are sorted by it once they are gathered.

Both are for all ranks. A rank that fails tells the others, which fail, too, instead of waiting.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import threading
from collections.abc import Iterator
from typing import Any, Literal

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tfdist import metric_merging, operations, world
from tfdist.data import is_sharded
from tfdist.errors import CollectiveError, CollectiveMismatchError, PeerFailedError
from tfdist.prediction_shares import Share, share_of

Gather = Literal["all", "root"]


class _Local(threading.local):
    merging = False


_local = _Local()


def is_joint(data: Any) -> bool:
    """Whether `model.evaluate(data)` is for all ranks: data came from `shard`, and nobody merges already."""
    return not _local.merging and is_sharded(data)


def evaluate(model: Any, data: Any, **options: Any) -> dict[str, Any]:
    """Evaluates on the data of all ranks; every rank calls it, each with its own data.

    The result is that of one process on all ranks' data, for every metric that Keras ships; see
    `MetricAverageCallback` for metrics of your own. It needs no optimizer, and moves the states of metrics alone.

    Args:
        model: a compiled model with equal weights on all ranks.
        data: what `model.evaluate` takes as `x`: this rank's part of the data, as `tfdist.shard` gives. Data that
            are the same on all ranks count several times.
        **options: further arguments of `model.evaluate`, such as `y` or `steps`. Rank 0 alone shows progress.

    Returns:
        Values by name, the same on all ranks.

    Raises:
        PeerFailedError: another rank failed while it evaluated.
        CollectiveTimeoutError: a rank did not call within the world's timeout.

    Example:
        >>> import keras, numpy as np, tfdist
        >>> tfdist.init()
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="zeros")])
        >>> model.compile(loss="mse")
        >>> data = tfdist.shard((np.ones((6, 2)), np.ones((6, 1))), shuffle=False)
        >>> tfdist.evaluate(model, data, verbose=0)
        {'loss': 1.0}
    """
    if world.current().is_placed:  # metrics are those of all replicas
        placed_logs: dict[str, Any] = model.evaluate(data, **options, return_dict=True)
        return placed_logs
    with _failing_together("evaluate"):
        if world.rank() > 0:
            options["verbose"] = 0
        before, _local.merging = _local.merging, True
        try:
            logs: dict[str, Any] = model.evaluate(data, **options, return_dict=True)
        finally:
            _local.merging = before
    merge_evaluation(model, logs)
    return logs


def merge_evaluation(model: Any, logs: dict[str, Any]) -> None:
    """Makes `logs` of an evaluation those of all ranks' data; every rank calls it after its own evaluation.

    Args:
        model: the model, whose metrics hold what this rank measured, and then what all did.
        logs: changed in place; empty on a rank without data.
    """
    if world.is_alone():
        return
    answers = _meet("evaluate", metric_merging.measure(model, logs).to_payload())
    for name in metric_merging.merge_into(logs, model, answers):
        _tell(metric_merging.averaged_notice(name))


def predict(
    model: Any,
    data: Any,
    *,
    gather: Gather = "all",
    batch_size: int | None = None,
    steps: int | None = None,
    callbacks: Any = None,
    **options: Any,
) -> Any:
    """Predicts with all ranks; every rank calls it with the same data, or with its shard of them.

    Each rank predicts a share of whole batches, and the shares are put together in the order of the input. The
    batches are those that one process would make, so the result is what `model.predict` gives on one process.
    Bytes: each rank's results go once to every other rank, as one pickled object; the ranks trust each other.

    | data | what a rank predicts |
    |---|---|
    | arrays, in any structure that the model takes | a run of consecutive batches |
    | `tf.data.Dataset` of batches; of samples, with `batch_size` | batches in turns |
    | `keras.utils.PyDataset` | batches in turns |
    | what `tfdist.shard` returned for data in order | its shard |

    A shard must not be shuffled: pass `shuffle=False` for arrays. After `tfdist.shard`, datasets may be mapped,
    cached, prefetched, and batched if single samples were sharded. Rows that `shard` dropped are missing in the
    result; `remainder="keep"` keeps them. Where whole batches were sharded, the model must run one batch per
    execution. `model.predict` itself stays local to a rank, whatever its data.

    Args:
        model: any model, with equal weights on all ranks.
        data: see the table.
        gather: "all" gives every rank the result, "root" rank 0 alone.
        batch_size: rows per batch of arrays, 32 by default, or of a dataset of samples.
        steps: how many batches of the whole data to predict; of a shard, of this rank's part.
        callbacks: as for `model.predict`; each rank's see that rank's batches.
        **options: further arguments of `model.predict`. Rank 0 alone shows progress.

    Returns:
        Arrays in the structure of the model's outputs, all rows in the order of the input; None on the other ranks
        with `gather="root"`. Outputs whose other axes differ between batches are RaggedTensors, as in Keras.

    Raises:
        ValueError: the data are a generator, or without end, or their order is lost, or there are none.
        CollectiveMismatchError: ranks call with different arguments, or data that visibly differ.
        PeerFailedError: another rank failed while it predicted.
        CollectiveTimeoutError: a rank did not call within the world's timeout.

    Example:
        >>> import keras, numpy as np, tfdist
        >>> tfdist.init()
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
        >>> tfdist.predict(model, np.array([[1.0, 2.0], [3.0, 4.0]]), verbose=0).tolist()
        [[3.0], [7.0]]
    """
    if world.current().is_placed:
        return model.predict(data, batch_size=batch_size, steps=steps, callbacks=callbacks, **options)
    with _failing_together("predict"):
        if gather not in ("all", "root"):
            raise ValueError(f'`gather` must be "all" or "root". Received: {gather!r}.')
        share = share_of(data, batch_size, steps, int(model.steps_per_execution))
        arguments = {"gather": gather, "batch_size": batch_size, "steps": steps} | share.facts
    _require_equal("predict", _meet("predict", str(arguments)))
    with _failing_together("predict"):
        mine = _predict_share(model, share, callbacks, options)
    _meet("predict", None)
    parts = _gather(mine, gather)
    return None if parts is None else _put_together(parts)


# Predicting.


class _RowCounter(keras.callbacks.Callback):  # type: ignore[misc]  # Keras is untyped
    """Counts the rows that each execution gave."""

    def __init__(self) -> None:
        super().__init__()
        self.executions: list[int] = []
        self.ended = False

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        # Keras makes a number of an output that has a single one.
        self.executions.append(max(_rows(leaf) for leaf in keras.tree.flatten(logs)))

    def on_predict_end(self, logs: Any = None) -> None:
        self.ended = True


def _rows(leaf: Any) -> int:
    return int(leaf.shape[0]) if getattr(leaf, "shape", ()) else 1


@dataclasses.dataclass(frozen=True)
class _Part:
    """What one rank predicted.

    Attributes:
        structure: that of the outputs, with None for each array; None without rows.
        leaves: the outputs, arrays or RaggedTensors as (values, row splits…).
        places: sort key of each row.
    """

    structure: Any
    leaves: list[Any]
    places: npt.NDArray[np.int64]


def _predict_share(model: Any, share: Share, callbacks: Any, options: dict[str, Any]) -> _Part:
    counter = _RowCounter()
    options = {**options, **share.options, "callbacks": [*keras.tree.flatten(callbacks or []), counter]}
    if world.rank() > 0:
        options["verbose"] = 0
    nothing = _Part(None, [], np.zeros([0], np.int64))
    if share.data is None:
        return nothing
    try:
        outputs = model.predict(share.data, **options)
    except Exception:
        if counter.ended and not counter.executions:
            return nothing  # Keras doesn't know what to return where there are no data
        raise
    places = share.places(counter.executions)
    leaves = keras.tree.flatten(outputs)
    for leaf in leaves:
        if isinstance(leaf, tf.SparseTensor) or _rows(leaf) != len(places):
            raise ValueError(
                "tfdist.predict puts rows in order, so each output must be a dense or ragged tensor with one row "
                f"per row of the input. Received: {len(places)} rows, and an output of type {type(leaf).__name__} "
                f"and shape {getattr(leaf, 'shape', ())}."
            )
    return _Part(keras.tree.map_structure(lambda _: 0, outputs), [_packed(leaf) for leaf in leaves], places)


def _packed(leaf: Any) -> Any:
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.flat_values.numpy(), [splits.numpy() for splits in leaf.nested_row_splits]
    return np.asarray(leaf)


def _unpacked(leaf: Any) -> Any:
    if isinstance(leaf, tuple):
        return tf.RaggedTensor.from_nested_row_splits(*leaf)
    return leaf


# Gathering.


def _gather(mine: _Part, gather: Gather) -> list[_Part] | None:
    if world.is_alone():
        return [mine]
    if gather == "all":
        return operations.allgather_object(mine, name="predict")
    data = np.frombuffer(pickle.dumps(mine), np.uint8)
    splits = [len(data)] + [0] * (world.size() - 1)
    received, lengths = operations.alltoall(tf.constant(data), splits, name="predict to root")
    if world.rank() > 0:
        return None
    ends = np.cumsum(lengths.numpy())
    content = received.numpy()
    return [
        pickle.loads(content[end - length : end].tobytes())
        for end, length in zip(ends, lengths.numpy(), strict=True)
    ]


def _put_together(parts: list[_Part]) -> Any:
    filled = [part for part in parts if len(part.places)]
    if not filled:
        raise ValueError("tfdist.predict needs at least one row. Received: data without any.")
    places = np.concatenate([part.places for part in filled])
    order = None if np.all(places[:-1] <= places[1:]) else np.argsort(places, kind="stable")
    columns = zip(*(part.leaves for part in filled), strict=True)
    leaves = [_ordered(_joined([_unpacked(leaf) for leaf in column]), order) for column in columns]
    return keras.tree.pack_sequence_as(filled[0].structure, leaves)


def _joined(leaves: list[Any]) -> Any:
    """Rows of all ranks; ragged if their other axes differ."""
    if len(leaves) == 1:
        return leaves[0]
    ragged = any(isinstance(leaf, tf.RaggedTensor) for leaf in leaves)
    shapes = {leaf.shape[1:] for leaf in leaves}
    if not ragged and len(shapes) == 1:
        return np.concatenate(leaves)
    if ragged:
        rank = max(leaf.ragged_rank for leaf in leaves if isinstance(leaf, tf.RaggedTensor))
    else:
        axes = range(1, leaves[0].ndim)
        rank = max(axis for axis in axes if len({leaf.shape[axis] for leaf in leaves}) > 1)
    return tf.concat(
        [
            leaf
            if isinstance(leaf, tf.RaggedTensor)
            else tf.RaggedTensor.from_tensor(leaf, ragged_rank=rank, row_splits_dtype=tf.int64)
            for leaf in leaves
        ],
        axis=0,
    )


def _ordered(rows: Any, order: npt.NDArray[np.int64] | None) -> Any:
    if order is None:
        return rows
    return tf.gather(rows, order) if isinstance(rows, tf.RaggedTensor) else rows[order]


# Meeting.


def _meet(what: str, value: Any, *, failure: str = "") -> list[Any]:
    """Exchanges a value with all ranks; raises where another has failed."""
    control = world.current().control
    if control is None:
        return [value]
    answers = control.exchange(
        f"tfdist.{what}",
        {"value": value, "failure": failure},
        describe=f"tfdist.{what}",
    )
    failures = {rank: answer["failure"] for rank, answer in enumerate(answers) if answer["failure"]}
    if failures and not failure:
        listed = "; ".join(f"rank {rank} with {text}" for rank, text in failures.items())
        raise PeerFailedError(
            f"rank {world.rank()} leaves tfdist.{what} because another rank did: {listed}. Mend the error on that "
            "rank."
        )
    return [answer["value"] for answer in answers]


def _require_equal(what: str, said: list[str]) -> None:
    if len(set(said)) > 1:
        listed = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(said))
        raise CollectiveMismatchError(
            f"All ranks must call tfdist.{what} with the same arguments and data. Received {listed}."
        )


def tell_failure(what: str, error: Exception) -> None:
    """Tells the other ranks, where they wait next in this `what`, that this one has left with `error`."""
    if not isinstance(error, CollectiveError | PeerFailedError):  # those they know
        with contextlib.suppress(Exception):
            _meet(what, None, failure=f"{type(error).__name__}: {error}")


@contextlib.contextmanager
def _failing_together(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        tell_failure(what, error)
        raise


_told: set[str] = set()


def _tell(message: str) -> None:
    if message not in _told and world.rank() == 0:
        _told.add(message)
        print(f"tfdist: {message}", flush=True)
