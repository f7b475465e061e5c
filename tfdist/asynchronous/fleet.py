"""The workers of a world: what is submitted to them, and which of them still live.

TensorFlow's `ClusterCoordinator` has a thread for each worker, which takes tasks from one queue. It would
wait for a lost worker to come back, for an hour, and ask for it all the time. Here lost ones don't come back;
whether one is lost, the control channel knows at once.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import tensorflow as tf

from tfdist.asynchronous import servers
from tfdist.control import ControlPlane
from tfdist.errors import PeerLostError
from tfdist.strategies.asynchronous_roles import Roles

SETTLE = 5.0  # seconds within which the control channel must have noticed that a process is gone
LOSSES = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError)
"""What TensorFlow raises where a process was that is gone; or after a passing fault of the network."""


class Fleet:
    """The workers of a world, and what is known of them.

    Args:
        distribution: TensorFlow's `ParameterServerStrategy`.
        roles: of the ranks.
        control: channel to them.
    """

    def __init__(self, distribution: Any, roles: Roles, control: ControlPlane) -> None:
        self.control = control
        # Its `schedule` takes functions that run on the worker from end to end; ours come back for their outputs.
        self._cluster = tf.distribute.coordinator.ClusterCoordinator(distribution)._cluster
        self._roles = roles
        self._told: set[int] = set()

    @property
    def size(self) -> int:
        """Workers that live."""
        return len(self._roles.workers) - len(self._lost())

    def submit(self, task: Any) -> None:
        """Has the next free worker's thread call `task(worker)`, on that worker's device."""

        def run() -> None:
            from tensorflow.python.distribute.coordinator import coordinator_context

            task(coordinator_context.get_current_dispatch_context().worker)

        self._cluster.schedule(run, (), {})

    def look(self) -> None:
        """Raises PeerLostError if training can't go on; says once which workers are gone."""
        if self.control.failure is not None:
            raise servers.explain_loss(self.control)
        for rank, text in self._lost().items():
            if rank not in self._told:
                self._told.add(rank)
                left = self.size
                print(
                    f"tfdist: {text} It was a worker: another one computes its batch, and training goes on with "
                    f"{left} of {len(self._roles.workers)} workers.",
                    file=sys.stderr,
                    flush=True,
                )
        if self.size == 0:
            raise PeerLostError(
                f"All {len(self._roles.workers)} workers are gone. Start the job again: with "
                "keras.callbacks.BackupAndRestore(folder) among the callbacks, fit() resumes from the last backup."
            )

    def is_lost(self, worker: Any, *, within: float) -> bool:
        """Whether a worker is gone, or the world has failed; waits so many seconds for the news."""
        rank = self._roles.workers[worker.worker_index]
        deadline = time.monotonic() + within
        while rank not in self._lost() and self.control.failure is None:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def is_failed(self, *, within: float) -> bool:
        """Whether a server is gone; waits so many seconds for the news."""
        deadline = time.monotonic() + within
        while self.control.failure is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.control.failure is not None

    def _lost(self) -> dict[int, str]:
        return {rank: text for rank, text in self.control.lost.items() if rank in self._roles.workers}
