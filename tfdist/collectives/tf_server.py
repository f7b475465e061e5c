"""The gRPC server behind the `tf` engine: a port without a race, and a context that stays uninitialised.

Problem: every rank's TensorFlow listens on a port that all others must know before any of them starts. A free
port that is looked up and released can be taken by another process; and enabling collectives with a call that
creates TensorFlow's context would forbid the device settings that scripts make after `tfdist.init()`.

Solution: a bound, not listening socket reserves the port for the life of the process: the kernel gives it to
nobody else, and gRPC, which binds with SO_REUSEADDR, can still listen on it. The ports travel with the
start-up barrier. The settings are stored in the context object before it is initialised; TensorFlow starts the
server when the first operation initialises it.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlparse

from tfdist.cluster import ClusterSpec
from tfdist.errors import BackendUnavailableError

JOB = "worker"
_reserved: socket.socket | None = None


def reserve_port() -> int:
    """A TCP port that belongs to this process until it ends; the same one at every call."""
    global _reserved
    if _reserved is None:
        _reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        _reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _reserved.bind(("", 0))
    return int(_reserved.getsockname()[1])


def own_address(spec: ClusterSpec) -> str:
    """Address under which other ranks reach this host: loopback unless the world spans hosts."""
    if spec.cross_size == 1:
        return "127.0.0.1"
    target = urlparse(spec.rendezvous).hostname if spec.rendezvous.startswith("tcp://") else None
    if target:
        # Connecting a datagram socket sends nothing; it only picks the interface that leads there.
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))
            address = str(probe.getsockname()[0])
        if not address.startswith("127."):
            return address
    return socket.gethostname()


def context_exists() -> bool:
    """Whether TensorFlow's context is initialised, after which no server can be added to it."""
    from tensorflow.python.eager import context

    return context.context()._context_handle is not None


def first_task(size: int) -> int:
    """TensorFlow's task number of rank 0; the others follow.

    TensorFlow sorts the members of a collective by their names as text, in which task 10 comes before task 2. With
    numbers of equal length that is the order of ranks, in which results of gathers must be.

    Example:
        >>> first_task(10), first_task(11), first_task(90), first_task(91)
        (0, 10, 10, 100)
    """
    first = 10
    while 9 * first < size:
        first *= 10
    return 0 if size <= 10 else first


def configure_server(addresses: Sequence[str], *, rank: int) -> None:
    """Stores the cluster in TensorFlow's context; the server starts with the context.

    Args:
        addresses: `host:port` of every rank's server.
        rank: this process.

    Raises:
        BackendUnavailableError: TensorFlow has executed an operation already.
    """
    import tensorflow as tf
    from tensorflow.core.protobuf import tensorflow_server_pb2
    from tensorflow.python.eager import context

    current = context.context()
    if context_exists() and not _is_configured_as(current, addresses):
        raise BackendUnavailableError(
            f"rank {rank}: TensorFlow has already executed an operation, after which its collectives can't be "
            "enabled (tensors made before would be lost). Call `tfdist.init()` before the first TensorFlow or "
            "Keras operation, model or dataset of the script."
        )
    if context_exists():
        return
    first = first_task(len(addresses))
    current.configure_collective_ops(
        collective_leader=f"/job:{JOB}/replica:0/task:{first}",
        # Rewriting collectives to share buffers would merge them by their order in this rank's graph.
        scoped_allocator_enabled_ops=(),
        # Without it every rank would keep a connection to, and wait for, every other rank's devices.
        device_filters=(f"/job:{JOB}/task:{first + rank}",),
    )
    server = tensorflow_server_pb2.ServerDef(
        cluster=tf.train.ClusterSpec({JOB: _tasks(addresses)}).as_cluster_def(),
        job_name=JOB,
        task_index=first + rank,
        protocol="grpc",
    )
    current.enable_collective_ops(_LateServerDef(server))


def configured_cluster() -> tuple[dict[str, dict[int, str]], int]:
    """The servers that `configure_server` has set up, by job and task, and this process's task."""
    from tensorflow.python.eager import context

    server = context.context()._collective_ops_server_def
    return {job.name: dict(job.tasks) for job in server.cluster.job}, int(server.task_index)


class _LateServerDef:
    """A ServerDef that takes devices and threads from the context when the context starts the server.

    The server makes the devices. With the settings of the time of `tfdist.init()` it would ignore a
    `set_visible_devices` that comes after, and every rank would take every GPU.
    """

    def __init__(self, server: Any) -> None:
        self._server = server

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)

    def SerializeToString(self) -> bytes:  # noqa: N802 (a protocol buffer's method)
        from tensorflow.python.eager import context

        self._server.default_session_config.CopyFrom(context.context().config)
        return bytes(self._server.SerializeToString())


def _is_configured_as(current: Any, addresses: Sequence[str]) -> bool:
    """Whether a former world of this process set up the very same servers (init after shutdown)."""
    server = current._collective_ops_server_def
    if server is None:
        return False
    jobs = {job.name: dict(job.tasks) for job in server.cluster.job}
    return jobs == {JOB: _tasks(addresses)}


def _tasks(addresses: Sequence[str]) -> dict[int, str]:
    return dict(enumerate(addresses, start=first_task(len(addresses))))
