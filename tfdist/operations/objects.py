"""Python objects between ranks: pickled, and moved as bytes by the engine.

Unpickling runs code that the sender chose, so these trust the other ranks of the job, as the job's own
script does. cloudpickle is used where it is installed, so that lambdas and local classes travel, too.
"""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import world
from tfdist.errors import TfdistError
from tfdist.operations.agreement import begin, running, uncompiled
from tfdist.operations.reductions import check_root
from tfdist.process_sets import ProcessSet, global_process_set


@uncompiled
def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Gives every rank the root's Python object.

    Who calls: every rank of `process_set`, eagerly. Bytes: those of `broadcast` for the pickled object.
    The ranks unpickle what the root sent, so they trust it.

    Args:
        obj: anything that pickles; ignored except on the root.
        root_rank: world rank whose object all get.
        session: Horovod's argument for TensorFlow 1; only None is accepted.
        name: as for `allreduce`.
        process_set: the ranks that take part; all by default.

    Returns:
        On the root `obj` itself, elsewhere a copy of the root's.

    Example:
        >>> import tfdist
        >>> tfdist.init()
        >>> tfdist.broadcast_object({"epoch": 3})
        {'epoch': 3}
    """
    _require_eager("broadcast_object", session)
    check_root("broadcast_object", root_rank, process_set)
    is_root = world.rank() == root_rank
    data = np.frombuffer(_pickle(obj), np.uint8) if is_root else np.zeros([0], np.uint8)
    call = begin("broadcast_object", name, process_set, signature=f"root {root_rank}", payload=data.size)
    if is_root and call.group.size == 1:
        return obj
    assert call.payloads is not None
    length = int(call.payloads[call.group.position(root_rank)])
    buffer = np.zeros([_round_up(length)], np.uint8)
    buffer[: data.size] = data
    with running(call):
        [received] = world.current().engine.broadcast(
            [tf.constant(buffer)], root_rank, name=call.name, group=call.group
        )
    return obj if is_root else _unpickle(received.numpy()[:length].tobytes())


@uncompiled
def allgather_object(
    obj: Any,
    session: None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Gives every rank the Python objects of all ranks.

    Who calls: every rank of `process_set`, eagerly. Bytes: those of `allgather` for the pickled objects.
    The ranks unpickle what the others sent, so they trust each other.

    Args:
        obj: anything that pickles.
        session: Horovod's argument for TensorFlow 1; only None is accepted.
        name: as for `allreduce`.
        process_set: the ranks that take part; all by default.

    Returns:
        One object per rank, in the order of ranks.

    Example:
        >>> import tfdist
        >>> tfdist.init()
        >>> tfdist.allgather_object("here")
        ['here']
    """
    _require_eager("allgather_object", session)
    data = np.frombuffer(_pickle(obj), np.uint8)
    call = begin("allgather_object", name, process_set, signature="", payload=data.size)
    assert call.payloads is not None
    lengths = [int(length) for length in call.payloads]
    with running(call):
        gathered = world.current().engine.allgather(
            tf.constant(data), name=call.name, group=call.group, lengths=lengths
        )
    ends = np.cumsum(lengths)
    content = gathered.numpy()
    return [
        _unpickle(content[end - length : end].tobytes()) for end, length in zip(ends, lengths, strict=True)
    ]


def _pickle(obj: Any) -> bytes:
    try:
        import cloudpickle
    except ImportError:
        return pickle.dumps(obj)
    return bytes(cloudpickle.dumps(obj))


def _unpickle(data: bytes) -> Any:
    return pickle.loads(data)


def _round_up(length: int) -> int:
    """Few distinct buffer sizes: engines keep something for every size they ever saw."""
    step = max(1024, 1 << max(0, length.bit_length() - 4))
    return max(1, -(-length // step)) * step


def _require_eager(kind: str, session: None) -> None:
    if session is not None:
        raise TfdistError(f"{kind} runs eagerly and takes no session; received {session!r}.")
    if not tf.executing_eagerly():
        raise TfdistError(
            f"{kind} handles Python objects, so it must be called eagerly; received a call inside a tf.function on "
            f"rank {world.rank()}. Call it outside, and pass the result in."
        )
