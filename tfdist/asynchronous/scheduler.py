"""Who computes which batch, and what is applied next; the one thread that calls `fit()` decides both.

    iterator ── batches ──> coordinator's queue ──> workers ── results ──> ready ── in turn ──> servers

`fit()` asks for the logs of the next step that is done. Until there is one, batches are handed out ahead, so that
workers need not wait for callbacks, nor callbacks for workers. Updates are made here and nowhere else, so
between two calls nothing changes. A batch goes to whichever worker is free: each is used once, and a slow
worker gets fewer.

A worker that is lost hands its batch back. It is known to be lost when its control connection breaks, which it does
at once for a process that is killed; an error of a step alone may be a passing one of the network.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist.asynchronous.fleet import LOSSES, SETTLE, Fleet
from tfdist.asynchronous.server_update import ServerUpdate
from tfdist.asynchronous.staleness import StalenessBound
from tfdist.asynchronous.worker_step import WorkerStep

_AHEAD = 2  # steps under way per worker: one that it computes, and one that it goes on with
_LOOK = 0.2  # seconds between looks at the control channel
_RETRIES = 3  # of a step that fails although its worker lives


@dataclasses.dataclass
class _Job:
    """A batch on its way through a worker."""

    number: int
    batch: list[Any]
    step: WorkerStep
    update: ServerUpdate
    outputs: list[Any] | None = None
    error: BaseException | None = None
    failures: int = 0


class Scheduler:
    """The steps of one model.

    Args:
        fleet: who computes.
        max_staleness: bound of staleness, or None.
    """

    def __init__(self, fleet: Fleet, max_staleness: int | None) -> None:
        self._fleet = fleet
        self._bound = StalenessBound(max_staleness)
        self._numbers = itertools.count()
        self._under_way: dict[int, _Job] = {}
        self._ready: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._waiting: list[_Job] = []
        self._lock = threading.Lock()
        self._updater = concurrent.futures.ThreadPoolExecutor(1, "tfdist-update")
        self.begin_epoch(None)

    def begin_epoch(self, steps: int | None) -> None:
        """Forgets what is under way; at most `steps` batches will be taken, all that there are by default."""
        self.discard()
        self._left = steps
        self._exhausted = False
        self.staleness = 0

    def discard(self) -> None:
        """Drops all steps that are not applied yet; what workers still compute changes nothing."""
        with self._lock:
            for number in self._under_way:
                self._bound.drop(number)
            self._under_way.clear()
        self._waiting.clear()

    def next_logs(self, batches: Iterator[Any], prepare: Any) -> dict[str, Any]:
        """Applies one more step.

        Args:
            batches: of tensors, in the structure that the model takes.
            prepare: gives a batch's tensors, its step and its update.

        Returns:
            Logs of that step, now part of model, optimizer and metrics.

        Raises:
            StopIteration: every batch has been used and applied.
            PeerLostError: a server, or the last worker, is gone.
        """
        while True:
            job = self._next_to_apply()
            if job is not None:
                return self._apply(job, lambda: self._hand_out(batches, prepare))
            self._hand_out(batches, prepare)
            if not self._under_way:
                raise StopIteration
            self._receive()

    def _hand_out(self, batches: Iterator[Any], prepare: Any) -> None:
        while (
            not self._exhausted
            and self._left != 0
            and len(self._under_way) <= _AHEAD * self._fleet.size  # one of them is being applied
            and self._bound.may_begin(len(self._under_way))
        ):
            try:
                batch = next(batches)
            except StopIteration:
                self._exhausted = True
                return
            self._left = None if self._left is None else self._left - 1
            tensors, step, update = prepare(batch)
            job = _Job(next(self._numbers), tensors, step, update)
            self._under_way[job.number] = job
            self._fleet.submit(lambda worker, job=job: self._attempt(worker, job))
        self._fleet.look()

    def _attempt(self, worker: Any, job: _Job) -> None:
        """In a worker's thread: computes a step, or sees to it that another worker does."""
        with self._lock:
            if job.number not in self._under_way:
                return
            self._bound.begin(job.number)
        try:
            job.outputs = job.step(job.batch, worker.worker_index)
        except LOSSES as error:
            if self._fleet.is_lost(worker, within=SETTLE):
                worker.stop()  # its thread takes no more
            else:
                job.failures += 1
            if self._fleet.control.failure is None and job.failures <= _RETRIES:
                self._fleet.submit(lambda other: self._attempt(other, job))
                return
            job.error = error
        except BaseException as error:
            job.error = error
        self._ready.put(job)

    def _receive(self) -> None:
        try:
            self._waiting.append(self._ready.get(timeout=_LOOK))
            while True:
                self._waiting.append(self._ready.get_nowait())
        except queue.Empty:
            self._fleet.look()

    def _next_to_apply(self) -> _Job | None:
        while not self._ready.empty():
            self._waiting.append(self._ready.get())
        self._waiting = [job for job in self._waiting if job.number in self._under_way]
        for place, job in enumerate(self._waiting):
            if job.error is not None:
                self.discard()
                raise job.error
            if self._bound.may_apply(job.number):
                return self._waiting.pop(place)
        return None

    def _apply(self, job: _Job, meanwhile: Callable[[], None]) -> dict[str, Any]:
        assert job.outputs is not None
        update = self._updater.submit(job.update, job.outputs)
        meanwhile()
        while not update.done():
            concurrent.futures.wait([update], timeout=_LOOK)
            self._fleet.look()
        logs = update.result()
        with self._lock:
            del self._under_way[job.number]
            stale = self._bound.apply(job.number)
        self.staleness = max(self.staleness, stale)
        return logs


def flat_tensors(batch: Any) -> tuple[list[Any], Any, list[Any]]:
    """A batch as tensors, with what it takes to describe and to rebuild it.

    Returns:
        Its tensors, the nested structure with None where there is nothing, and a specification for each tensor,
        whose first axis may have any length.
    """
    structure = tf.nest.map_structure(
        lambda part: None if isinstance(part, tf.experimental.Optional) else part, batch
    )
    leaves = [
        leaf if leaf is None else tf.convert_to_tensor(leaf)
        for leaf in tf.nest.flatten(structure, expand_composites=True)
    ]
    tensors = [leaf for leaf in leaves if leaf is not None]
    return tensors, structure, [_any_length(tensor) for tensor in tensors]


def _any_length(tensor: Any) -> Any:
    shape: Sequence[Any] = tensor.shape
    return tf.TensorSpec([None, *shape[1:]] if len(shape) else [], tensor.dtype)
