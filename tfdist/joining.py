"""`join`: a rank whose data has ended goes on taking part in a loop of the user's own until all ranks' data has.

In `fit()` tfdist sees the end of the data. In a loop that calls `optimizer.apply` only the loop knows it, and says
so by `join`. Until then every update through a `DistributedOptimizer` tells the other ranks that this one has data,
in the same message as its gradients (see `joint_step`). A rank in `join` repeats its last update with gradients
that count for nothing. So it applies what the others apply, and ends with the weights that they end with.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist import operations, world
from tfdist.errors import TfdistError
from tfdist.joint_step import FULL_SHARE, JointSteps

Update = Callable[[list[Any]], Any]


class LoopSteps:
    """The updates through one optimizer outside `fit()`.

    Args:
        close: ends a window of accumulated passes; called by all ranks when none has data.
    """

    _made = itertools.count()

    def __init__(self, close: Callable[[], None]) -> None:
        self.close = close
        self.number = next(self._made)
        self._steps: JointSteps | None = None
        self._kinds: list[Any] = []
        self._eager = False
        self._graph: weakref.ref[tf.Graph] | None = None
        self._repeats = False
        self._idle: Callable[[], Any] | None = None

    def step(self, gradients: Sequence[Any], update: Update) -> Any:
        """Makes an update with data.

        Args:
            gradients: this rank's: tensors, `tf.IndexedSlices` or None.
            update: combines and applies them; within, `joint_step.current()` is this step.
        """
        if self._steps is None:
            self._steps = JointSteps()
            _used.add(self)
        steps = self._steps
        self._remember(gradients, update)
        with steps.step(FULL_SHARE):
            return update(list(gradients))

    @property
    def is_used(self) -> bool:
        """Whether there was an update."""
        return self._steps is not None

    @contextlib.contextmanager
    def closing(self) -> Iterator[None]:
        """Inside, a window of accumulated passes is closed."""
        assert self._steps is not None
        self._steps.begin_epoch()
        with self._steps.step(None, closes=True):
            yield

    def join(self) -> int:
        """Takes part in the updates of the other ranks until none has data.

        Returns:
            How many there were.
        """
        assert self._steps is not None
        assert self._idle is not None
        if self._repeats:
            raise TfdistError(
                "tfdist.join() repeats the last update of an optimizer, but one tf.function applies this optimizer "
                "several times. Apply it once per function, or give all ranks the same number of batches "
                "(`tfdist.shard` does)."
            )
        self._steps.begin_epoch()
        self._idle()
        count = 0
        while self._steps.outcome.active != 0:
            self._idle()
            count += 1
        return count

    def _remember(self, gradients: Sequence[Any], update: Update) -> None:
        eager = tf.executing_eagerly()
        if not eager:
            graph = tf.compat.v1.get_default_graph()
            self._repeats = self._graph is not None and self._graph() is graph
            self._graph = weakref.ref(graph)
        kinds = [_kind(gradient) for gradient in gradients]
        if self._idle is not None and (kinds, eager) == (self._kinds, self._eager):
            return
        self._kinds, self._eager = kinds, eager
        steps = self._steps
        assert steps is not None

        def idle() -> None:
            with steps.step(None):
                update([_nothing(kind) for kind in kinds])

        # What the other ranks run in a graph must be met in a graph.
        self._idle = idle if eager else tf.function(idle, autograph=False)


_used: weakref.WeakSet[LoopSteps] = weakref.WeakSet()


def join(device: int = -1) -> int:
    """Says that this rank's data has ended; returns once that of all ranks has. Every rank calls it.

    For loops of your own; `fit()` needs none of it. The other ranks go on, and this one makes their updates, too,
    without counting in the average: `tfdist.Average` is over the ranks that still have data, each counting the
    same. So ranks stay equal. (With Horovod a joined rank counts as zeros, and keeps its old weights.) Only updates
    through `DistributedOptimizer` are joined, not `tfdist.allreduce` and its like in the same loop. Several
    optimizers may take turns in any order, each applied once per tf.function.

    Args:
        device: there for Horovod's signature; without effect.

    Returns:
        The rank that joined last; the highest of several that joined in the same step.

    Raises:
        TfdistError: this rank has made no update yet, or applies one optimizer several times in a tf.function.
        PeerLostError: a rank that still had data is gone.

    Example:
        >>> import keras, tensorflow as tf, tfdist
        >>> tfdist.init()
        >>> weight = keras.Variable(1.0)
        >>> optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1))
        >>> for batch in range(3 if tfdist.rank() == 0 else 2):
        ...     optimizer.apply([tf.constant(1.0)], [weight])
        >>> tfdist.join()
        0

    Source: Horovod's `hvd.join`, and `torch.distributed.algorithms.Join`.
    """
    current = world.current()
    if current.control is None:
        return 0
    gc.collect()  # optimizers that are no longer used must be gone on all ranks alike
    loops = list(_used)
    if not loops:
        raise TfdistError(
            f"rank {current.spec.rank} called tfdist.join() before any update through a DistributedOptimizer, so "
            "it does not know what the other ranks reduce. Give every rank at least one batch; a "
            "DistributedGradientTape with a plain optimizer can't join, so wrap the optimizer instead."
        )
    try:
        counts = _all_at_once([loop.join for loop in loops])
    except Exception as error:
        explained = operations.translate(error, waiting_for="tfdist.join()")
        if explained is error:
            raise
        raise explained from error
    answers = current.control.exchange("join", max(counts))
    for loop in sorted(loops, key=lambda loop: loop.number):
        loop.close()
    return max(range(len(answers)), key=lambda rank: (-answers[rank], rank))


def _all_at_once(bodies: Sequence[Callable[[], int]]) -> list[int]:
    """Calls all, each in a thread of its own: in which order the other ranks need them, only they know."""
    if len(bodies) == 1:
        return [bodies[0]()]
    results: list[int] = [0] * len(bodies)
    errors: list[BaseException] = []

    def call(place: int) -> None:
        try:
            results[place] = bodies[place]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=(place,), daemon=True) for place in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive() and not errors:
            thread.join(0.1)
    if errors:
        raise errors[0]
    return results


def _kind(gradient: Any) -> Any:
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        shape = tf.get_static_value(gradient.dense_shape) if gradient.dense_shape is not None else None
        table = None if shape is None else [int(length) for length in shape]
        return ("rows", gradient.dtype, gradient.values.shape[1:].as_list(), gradient.indices.dtype, table)
    gradient = tf.convert_to_tensor(gradient)
    return ("dense", gradient.dtype, gradient.shape.as_list())


def _nothing(kind: Any) -> Any:
    """A gradient of this kind that adds nothing."""
    if kind is None:
        return None
    if kind[0] == "dense":
        return tf.zeros(kind[2], kind[1])
    _, dtype, row, index, table = kind
    return tf.IndexedSlices(
        tf.zeros([0, *row], dtype),
        tf.zeros([0], index),
        None if table is None else tf.constant(table, tf.int64),
    )
