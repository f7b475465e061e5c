"""Before tensors move: who takes part, under which name, and do all ranks mean the same?

Engines can't tell a wrong call from a late one: they hang, or fail for good. So an eager call first meets its
peers in the control channel, where a difference is an error on every rank that says who sent what, after
which the world goes on working; and a rank that doesn't come is named after the world's timeout. Inside
`tf.function` nothing may wait while tracing: there the signature is announced, and a difference fails the
world.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import tensorflow as tf

from tfdist import graph_watch, world
from tfdist.collectives.base import Group
from tfdist.errors import (
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PeerLostError,
    TfdistError,
)
from tfdist.operations.names import derive_name
from tfdist.process_sets import ProcessSet

# Unnamed eager calls reuse a few engine names: engines keep something for every name they ever saw.
_EAGER_NAMES = 16
_LONGEST_SIGNATURE = 4000

F = TypeVar("F", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class Call:
    """One collective, agreed or announced.

    Attributes:
        kind: such as `allreduce`.
        name: under which the engine runs it.
        group: the ranks that take part.
        payloads: what every rank of the group passed along, in their order; None inside `tf.function`.
        given: name for the gradient's collective; None while that must be numbered anew.
    """

    kind: str
    name: str
    group: Group
    payloads: list[Any] | None
    given: str | None

    @property
    def gradient(self) -> str | None:
        """Name of the collective that computes this one's gradient."""
        return None if self.given is None else f"{self.given}.grad"


class _Numbers:
    """Counts unnamed eager calls by group, anew for every world."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._world: world.World | None = None
        self._counters: dict[int, Iterator[int]] = {}

    def next(self, current: world.World, group: Group) -> int:
        with self._lock:
            if self._world is not current:
                self._world, self._counters = current, {}
            return next(self._counters.setdefault(group.index, itertools.count()))


_numbers = _Numbers()


def begin(
    kind: str, name: str | None, process_set: ProcessSet, *, signature: str, payload: Any = None
) -> Call:
    """Agrees on (eager) or announces (inside `tf.function`) a collective.

    Args:
        kind: such as `allreduce`.
        name: the user's, or None.
        process_set: who takes part.
        signature: what must be equal on all ranks, readable.
        payload: what the others learn from an eager call, JSON values.

    Raises:
        CollectiveMismatchError: signatures differ (eager).
        CollectiveTimeoutError: a rank did not come (eager).
        TfdistError: this rank is not in the process set, or XLA would compile the collective.
    """
    current = world.current()
    group = process_set.group()
    if current.spec.rank not in group.ranks:
        raise TfdistError(
            f"{kind} on a process set must be called by its ranks {list(group.ranks)} only; received a call on "
            f"rank {current.spec.rank}. Guard it with `if process_set.included():`."
        )
    if name is not None and not isinstance(name, str):
        raise TfdistError(f"{kind}: name must be a string; received {name!r}.")
    signature = f"{kind} {_shorten(signature)}"
    if tf.executing_eagerly():
        number = _numbers.next(current, group) if name is None else 0
        label = f"unnamed collective {number}" if name is None else f"collective {name!r}"
        payloads = [payload]
        if current.control is not None:
            payloads = current.control.exchange(
                f"{label} of process set {group.index}",
                payload,
                ranks=group.ranks,
                timeout=current.timeout,
                check=signature,
                describe=f"{kind} {name!r}" if name is not None else f"{kind} (unnamed collective {number})",
            )
        engine_name = f"eager.{number % _EAGER_NAMES}" if name is None else f"eager.{name}"
        return Call(kind, engine_name, group, payloads, name)
    _refuse_xla(kind, current)
    derived = derive_name(kind, name)
    if current.control is not None:
        current.control.announce(f"collective {derived!r} of process set {group.index}", signature)
    return Call(kind, derived, group, None, derived)


def uncompiled(function: F) -> F:
    """Keeps AutoGraph out of a collective's own Python, which it would rewrite inside `tf.function`."""
    wrapped: F = tf.autograph.experimental.do_not_convert(function)
    return wrapped


@contextmanager
def running(call: Call) -> Iterator[None]:
    """Marks the engine's part of a call for diagnosis, and explains its errors."""
    control = world.current().control
    if control is None or call.payloads is None:
        yield
        return
    try:
        with control.section(f"{call.kind} {call.name!r}"):
            yield
    except TfdistError:
        raise
    except Exception as error:
        explained = translate(error)
        if explained is error:
            raise
        raise explained from error


def run_engine(
    call: Call, inputs: Sequence[Any], work: Callable[[Sequence[Any]], Sequence[Any]]
) -> list[Any]:
    """Runs the engine's part of a call: bounded, explained, and never pruned.

    Args:
        call: from `begin`.
        inputs: tensors for the engine.
        work: calls the engine with them and returns its results.
    """
    with running(call):
        # An eager call has met its peers already; in a graph no engine bounds its waits.
        watched = False
        if call.payloads is None:
            inputs, watched = graph_watch.enter(call.name, inputs, call.group.ranks)
        outputs = list(work(inputs))
        if watched:
            outputs = graph_watch.leave(call.name, outputs)
    return keep(call, outputs)


def keep(call: Call, outputs: Sequence[Any]) -> list[Any]:
    """The outputs of a collective, which now runs even if this rank uses none of them.

    TensorFlow prunes what a function doesn't need, and drops loops, branches and inner functions without side
    effects. A collective that is pruned on one rank (`if rank() == 0:` use its result) leaves the others
    waiting. So a value of each output is assigned to a variable that nobody reads: a side effect, and a
    dependency on data, since TensorFlow replaces by nothing an op that others only wait for (Horovod's are
    declared free of side effects). Because assignments stay in order, an inner function that is called twice
    runs twice in order, too.
    """
    if call.payloads is None and call.group.size > 1:
        values = [tf.cast(tf.reshape(output, [-1])[:1], tf.float32) for output in outputs]
        tf.raw_ops.AssignVariableOp(resource=_kept(), value=tf.concat(values, 0))
    return list(outputs)


@functools.cache
def _kept() -> Any:
    with tf.init_scope(), tf.device("/device:CPU:0"):
        return tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[None], shared_name="tfdist_kept_collectives")


def translate(error: BaseException, *, waiting_for: str = "the collective") -> BaseException:
    """What an error that came out of an engine means.

    Args:
        error: raised by an eager collective, or by running a function that contains one.
        waiting_for: the section of the control channel in which it was raised.

    Returns:
        A `CollectiveError` that names ranks and cause if the error came from a collective; otherwise the
        error itself.
    """
    if isinstance(error, TfdistError) or not world.is_initialized():
        return error
    current = world.current()
    text = str(error)
    if not isinstance(error, (tf.errors.OpError, RuntimeError)) or not _is_collective(text):
        return error
    control = current.control
    failure = control.failure if control is not None else None
    if failure is None and current.watchdog is not None:
        failure = current.watchdog.error
    if failure is not None:
        return failure
    summary = _summarise(text)
    where = f"rank {current.spec.rank}: a collective of the {current.engine.name} engine failed: {summary}"
    if _SIZES_DIFFER in text or "Mismatched" in text:
        return CollectiveMismatchError(
            f"{where}. All ranks must pass tensors of the same shape and dtype, and the same operation."
        )
    diagnosis = ""
    if control is not None:
        try:
            diagnosis = "\n" + control.diagnose(waiting_for)
        except (TfdistError, OSError) as problem:
            diagnosis = f"\n(no diagnosis: {problem})"
        if control.failure is not None:
            return control.failure
    if isinstance(error, tf.errors.DeadlineExceededError) or "timed out" in text.lower():
        return CollectiveTimeoutError(
            f"{where} within {current.timeout:g} s. A rank did not reach it: it took another branch, or is slow "
            f"(then raise `tfdist.init(timeout=...)`).{diagnosis}"
        )
    if isinstance(error, tf.errors.UnavailableError) or "Connection" in text or "has been shut down" in text:
        return PeerLostError(
            f"rank {current.spec.rank}: {waiting_for!r} can't complete, because a rank ended or its connection "
            f"broke.{diagnosis}\n(The {current.engine.name} engine said: {summary})"
        )
    return CollectiveError(f"{where}.{diagnosis}")


def describe(tensors: Sequence[Any]) -> str:
    """Dtypes and shapes for a signature, such as `float32[3,4], int64[]`."""
    return ", ".join(f"{tensor.dtype.name}{describe_shape(tensor.shape)}" for tensor in tensors)


def describe_shape(shape: Any) -> str:
    """A shape for a signature, such as `[3,?]`."""
    if shape.rank is None:
        return "[...]"
    return "[" + ",".join("?" if size is None else str(size) for size in shape.as_list()) + "]"


_SIZES_DIFFER = "tfdist: ranks passed different sizes to"
_MARKS = ("Collective", "collective", "Horovod", "horovod", _SIZES_DIFFER)


def _is_collective(text: str) -> bool:
    return any(mark in text for mark in _MARKS)


def _summarise(text: str) -> str:
    """TensorFlow's message without node names and the advice to restart."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    kept = [line for line in lines if not line.startswith(("Detected at", "File ", "The error could be"))]
    first = " ".join(kept[:3]) if kept else text
    return first[:600]


def _shorten(signature: str) -> str:
    if len(signature) <= _LONGEST_SIGNATURE:
        return signature
    digest = hashlib.sha256(signature.encode()).hexdigest()[:16]
    return f"{signature[:_LONGEST_SIGNATURE]}... (all of it: {digest})"


def _refuse_xla(kind: str, current: world.World) -> None:
    from tensorflow.python.ops import control_flow_util

    graph = tf.compat.v1.get_default_graph()
    if current.spec.size > 1 and control_flow_util.GraphOrParentsInXlaContext(graph):
        raise CollectiveError(
            f"{kind} can't be compiled by XLA; received a call inside a function with jit_compile=True on rank "
            f"{current.spec.rank}. Compile only the computation: put it into a function of its own with "
            "jit_compile=True, and call the collective outside of it (in Keras: `compile(jit_compile=False)`)."
        )
