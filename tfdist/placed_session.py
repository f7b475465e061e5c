"""One `fit()` under `multi_worker_mirrored`: its workers begin, decide and end together, or fail together.

Steps need no care: TensorFlow gives a worker that has run out of data empty batches until nobody has any. Logs are
those of all workers. But a callback may stop one worker, or raise there; the others then learn at the end of the
epoch, or, where they wait for it in a step, from the control channel.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from tfdist import world
from tfdist.callback_roles import runs_on_first_rank_only
from tfdist.errors import CollectiveError, OutOfSyncError, PeerFailedError
from tfdist.fit_session import require_same_point
from tfdist.optimizer import broadcast_state


class PlacedSession:
    """This rank's part in one `fit()`."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._callbacks: Any = None
        self._over = False

    def event(self, name: str, callbacks: Any, arguments: tuple[Any, ...], run: Callable[[], Any]) -> Any:
        """Runs a method of a CallbackList of this `fit()`."""
        if self._callbacks is None and name in ("set_model", "on_train_begin"):
            _leave_to_first_rank(callbacks)
            if name == "on_train_begin":
                self._callbacks = callbacks
                self._begin(callbacks.params)
        result = run()
        if callbacks is self._callbacks:
            if name == "on_train_begin":
                self._resume()
            elif name == "on_epoch_end":
                stops = self._meet(f"end of epoch {arguments[0] + 1}", bool(self._model.stop_training))
                self._model.stop_training = any(stops)
            elif name == "on_train_end":
                self._meet("end", None)
                self._over = True
        return result

    def fail(self, error: Exception) -> None:
        """Tells the others that this rank has left with `error`; they may be waiting in the middle of a step."""
        if self._over or isinstance(error, CollectiveError | PeerFailedError | OutOfSyncError):
            return  # the others know
        control = world.current().control
        if control is not None:
            with contextlib.suppress(Exception):
                control.close(error=f"it left fit() with {type(error).__name__}: {error}")

    def _begin(self, params: dict[str, Any]) -> None:
        mine = {"epochs": params.get("epochs"), "steps_per_execution": int(self._model.steps_per_execution)}
        answers = self._meet("begin", mine)
        for name in mine:
            if len({answer[name] for answer in answers}) > 1:
                listed = ", ".join(f"{answer[name]} on rank {rank}" for rank, answer in enumerate(answers))
                raise OutOfSyncError(f"All ranks must call fit() with the same {name}; received {listed}.")

    def _resume(self) -> None:
        """Takes the epoch at which training resumes from rank 0, whose callbacks alone read checkpoints."""
        first = self._meet("begun", getattr(self._model, "_initial_epoch", None))[0]
        if first is not None:
            self._model._initial_epoch = int(first)
            broadcast_state(self._model)

    def _meet(self, point: str, value: Any) -> list[Any]:
        control = world.current().control
        if control is None:
            return [value]
        answers = control.exchange("fit", {"point": point, "value": value}, describe=f"{point} of fit()")
        try:
            require_same_point({rank: answer["point"] for rank, answer in enumerate(answers)})
        except OutOfSyncError:
            self._over = True
            raise
        return [answer["value"] for answer in answers]


def _leave_to_first_rank(callbacks: Any) -> None:
    if world.rank() > 0:
        callbacks.callbacks = [each for each in callbacks.callbacks if not runs_on_first_rank_only(each)]
