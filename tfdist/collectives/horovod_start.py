"""Starts Horovod under any launcher: with its own rendezvous for Gloo, or inside the launcher's MPI.

Horovod learns where it is from environment variables that only its own launcher sets. Here they come from the
ClusterSpec, and rank 0 runs Horovod's rendezvous server in its own process, bound to loopback unless the
world spans hosts. Under horovodrun the environment is left as it is; under mpirun or srun a build with MPI
asks MPI. Variables that the user set are never overwritten; those set here are removed at the end.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tfdist.cluster import ClusterSpec
from tfdist.collectives.tf_server import own_address
from tfdist.errors import BackendUnavailableError

if TYPE_CHECKING:
    from tfdist.control import ControlPlane

_MPI_LAUNCHERS = ("openmpi", "mpich", "slurm")


class HorovodRuntime:
    """A running Horovod, its rendezvous server and the variables it was started with."""

    def __init__(self) -> None:
        self._replaced: dict[str, str | None] = {}
        self._server: Any = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def export(self, variables: Mapping[str, str]) -> None:
        """Sets environment variables until `stop`; Horovod reads them also when it adds process sets."""
        for name, value in variables.items():
            self._replaced.setdefault(name, os.environ.get(name))
            os.environ[name] = value

    def serve_rendezvous(self, host: str) -> int:
        """Starts Horovod's rendezvous server on this rank; returns its port."""
        from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

        self._server = RendezvousHTTPServer((host, 0), RendezvousHandler, 0)
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="tfdist-horovod-rendezvous",
            daemon=True,
        )  # fmt: skip
        self._thread.start()
        return int(self._server.server_address[1])

    def stop(self) -> None:
        """Ends Horovod and undoes everything; idempotent."""
        with self._lock:
            from horovod.tensorflow import mpi_ops

            with contextlib.suppress(Exception):
                mpi_ops.shutdown()
            if self._server is not None:
                self._server.shutdown()
                self._server.server_close()
                self._server = None
            if self._thread is not None:
                self._thread.join(2.0)
            for name, value in self._replaced.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
            self._replaced.clear()


def start_horovod(
    spec: ClusterSpec, control: ControlPlane, *, gloo: bool, mpi: bool, timeout: float
) -> HorovodRuntime:
    """Initialises Horovod on all ranks; every rank calls it.

    Args:
        spec: place of this process.
        control: connected to all ranks.
        gloo: whether all ranks' builds have Gloo.
        mpi: whether all ranks' builds have MPI.
        timeout: bound in seconds of the world's waits.

    Raises:
        BackendUnavailableError: Horovod does not start, or sees another world than the launcher.
    """
    from horovod.tensorflow import mpi_ops

    runtime = HorovodRuntime()
    runtime.export(_absent(_bounds(timeout)))
    controller = choose_controller(spec, gloo=gloo, mpi=mpi)
    if controller == "gloo" and spec.launcher != "horovodrun":
        host = str(control.roster[0].get("tf_host", "127.0.0.1"))
        port = runtime.serve_rendezvous(host) if spec.rank == 0 else 0
        port = control.exchange("horovod rendezvous", port, timeout=timeout)[0]
        runtime.export(_gloo_place(spec, host, port))
    elif controller == "mpi":
        runtime.export({"HOROVOD_CONTROLLER": "mpi", "HOROVOD_CPU_OPERATIONS": "mpi"})
    try:
        mpi_ops.init()
    except Exception as error:
        runtime.stop()
        raise BackendUnavailableError(
            f"rank {spec.rank}: Horovod does not start with {controller}: {error}. "
            'Use `backend="tf"`, or rebuild it '
            "with `tfdist build-horovod`."
        ) from error
    seen = (mpi_ops.rank(), mpi_ops.size())
    places = control.exchange("horovod started", list(seen), timeout=timeout)
    wrong = [rank for rank, place in enumerate(places) if tuple(place) != (rank, spec.size)]
    if wrong:
        runtime.stop()
        raise BackendUnavailableError(
            f"Horovod must see the launcher's world of {spec.size} ranks, but on rank {wrong[0]} it reports rank "
            f"{places[wrong[0]][0]} of {places[wrong[0]][1]} (launcher {spec.launcher}, controller {controller}). "
            'Rebuild it for this launcher with `tfdist build-horovod --with gloo,mpi`, or use `backend="tf"`.'
        )
    return runtime


def choose_controller(spec: ClusterSpec, *, gloo: bool, mpi: bool) -> str:
    """Which of Horovod's transports coordinates under this launcher: `mpi`, `gloo`, or empty if none can.

    Example:
        >>> choose_controller(ClusterSpec(launcher="openmpi"), gloo=True, mpi=True)
        'mpi'
        >>> choose_controller(ClusterSpec(launcher="openmpi"), gloo=True, mpi=False)
        'gloo'
    """
    if mpi and spec.launcher in _MPI_LAUNCHERS:
        return "mpi"
    return "gloo" if gloo else ""


def _bounds(timeout: float) -> dict[str, str]:
    """Horovod's own timers, so that none outlasts the world's bound or cuts a wait short."""
    seconds = max(1, round(timeout))
    return {
        "HOROVOD_STALL_CHECK_TIME_SECONDS": str(max(1, seconds // 2)),
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(seconds),
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(seconds),
        "HOROVOD_DYNAMIC_PROCESS_SETS": "1",
    }


def _gloo_place(spec: ClusterSpec, host: str, port: int) -> dict[str, str]:
    place = {
        "HOROVOD_RANK": str(spec.rank),
        "HOROVOD_SIZE": str(spec.size),
        "HOROVOD_LOCAL_RANK": str(spec.local_rank),
        "HOROVOD_LOCAL_SIZE": str(spec.local_size),
        "HOROVOD_CROSS_RANK": str(spec.cross_rank),
        "HOROVOD_CROSS_SIZE": str(spec.cross_size),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": host,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_HOSTNAME": own_address(spec),
    }
    if spec.cross_size == 1:
        place["HOROVOD_GLOO_IFACE"] = "lo"
    return place


def _absent(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in os.environ}
