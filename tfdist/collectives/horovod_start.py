"""Starts Horovod under any launcher: with its own rendezvous for Gloo, or inside the launcher's MPI.

Horovod learns where it is from environment variables that only its own launcher sets. Here they come from the
ClusterSpec, and rank 0 runs Horovod's rendezvous server in its own process, bound to loopback unless the
world spans hosts. Under horovodrun the environment is left as it is; under mpirun or srun a build with MPI
asks MPI. Variables that the user set are never overwritten; those set here are removed at the end.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tfdist.cluster import ClusterSpec
from tfdist.collectives.horovod_rendezvous import Rendezvous
from tfdist.collectives.own_sockets import own_sockets
from tfdist.collectives.tf_server import own_address
from tfdist.errors import BackendUnavailableError

if TYPE_CHECKING:
    from tfdist.control import ControlPlane

_DYNAMIC = "HOROVOD_DYNAMIC_PROCESS_SETS"
_MPI_LAUNCHERS = ("openmpi", "mpich", "slurm")


class HorovodRuntime:
    """A running Horovod, its rendezvous server, its process sets and the variables it was started with.

    Horovod fixes its process sets when it starts. Its own way to add some later, dynamic process sets, makes
    its background thread agree with all peers about them every millisecond, which costs a small model a tenth
    of its step. So here Horovod starts again when a set is added, which over Gloo takes a fraction of a second.
    MPI cannot be started twice in one process: there the sets go into `init`, or are dynamic by request.
    """

    def __init__(self, spec: ClusterSpec, control: ControlPlane, *, controller: str, timeout: float) -> None:
        """Horovod that is not started yet.

        Args:
            spec: place of this process.
            control: connected to all ranks.
            controller: `gloo` or `mpi`, see `choose_controller`; empty leaves the choice to Horovod.
            timeout: bound in seconds of the world's waits.
        """
        self._spec = spec
        self._control = control
        self._controller = controller
        self._timeout = timeout
        self._process_sets: dict[tuple[int, ...], Any] = {}
        self._starts = 0
        self._replaced: dict[str, str | None] = {}
        self._rendezvous: Rendezvous | None = None
        self._connections: set[tuple[int, int]] = set()
        self._lock = threading.Lock()

    def start(self, process_sets: Sequence[tuple[int, ...]], *, dynamic: bool) -> None:
        """Initialises Horovod on all ranks; every rank calls it.

        Args:
            process_sets: ranks of each set, the same on all ranks.
            dynamic: whether Horovod's own sets can be added and removed while it runs.

        Raises:
            BackendUnavailableError: Horovod does not start, or sees another world than the launcher.
        """
        self._export(_absent(_bounds(self._timeout)))
        if dynamic:
            self._export({_DYNAMIC: "1"})
        try:
            self._initialise(process_sets)
        except BaseException:
            self.stop()
            raise

    def process_set(self, ranks: tuple[int, ...]) -> Any:
        """Horovod's object for a set that `add_process_set` made; None without one."""
        return self._process_sets.get(ranks)

    def add_process_set(self, ranks: tuple[int, ...]) -> None:
        """Makes a set of some ranks, unless it is there; every rank calls it, with no collective in flight.

        Raises:
            BackendUnavailableError: Horovod over MPI, which cannot start again.
        """
        from horovod.tensorflow import mpi_ops

        if ranks in self._process_sets:
            return
        if _is_dynamic():
            self._process_sets[ranks] = mpi_ops.add_process_set(list(ranks))
        elif self._controller == "gloo":
            mpi_ops.shutdown()
            self._initialise([*self._process_sets, ranks])
        else:
            raise BackendUnavailableError(
                f"A process set of the ranks {list(ranks)} was added after the start, which Horovod over MPI "
                "allows only if it was prepared for it. Name the set in `tfdist.init(process_sets=[...])`, or call "
                '`tfdist.init(process_sets="dynamic")`, which costs a small model some of its speed.'
            )

    def remove_process_set(self, ranks: tuple[int, ...]) -> None:
        """Removes a dynamic set; every rank calls it. Others stay until Horovod ends."""
        from horovod.tensorflow import mpi_ops

        if _is_dynamic() and ranks in self._process_sets:
            mpi_ops.remove_process_set(self._process_sets.pop(ranks))

    def break_connections(self) -> None:
        """Ends Horovod's connections to its peers, which fails whatever it waits for.

        A Horovod over Gloo that is in the middle of a ring notices that a peer is gone only if it is a neighbour.
        """
        for number, _ in self._connections & _connections():
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                connection.shutdown(socket.SHUT_RDWR)

    def stop(self) -> None:
        """Ends Horovod and undoes everything; idempotent."""
        with self._lock:
            from horovod.tensorflow import mpi_ops

            with contextlib.suppress(Exception):
                mpi_ops.shutdown()
            self._stop_rendezvous()
            for name, value in self._replaced.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
            self._replaced.clear()

    def _initialise(self, process_sets: Sequence[tuple[int, ...]]) -> None:
        from horovod.common.process_sets import ProcessSet
        from horovod.tensorflow import mpi_ops

        spec, control = self._spec, self._control
        if self._controller == "mpi":
            self._export({"HOROVOD_CONTROLLER": "mpi", "HOROVOD_CPU_OPERATIONS": "mpi"})
        # horovodrun brings a rendezvous of its own, which serves one start.
        elif self._controller == "gloo" and (spec.launcher != "horovodrun" or self._starts):
            self._stop_rendezvous()
            host = str(control.roster[0].get("tf_host", "127.0.0.1"))
            if spec.rank == 0:
                self._rendezvous = Rendezvous(host)
            port = self._rendezvous.port if self._rendezvous is not None else 0
            port = control.exchange("horovod rendezvous", port, timeout=self._timeout)[0]
            self._export(_gloo_place(spec, host, port))
        self._starts += 1
        sets = {ranks: ProcessSet(list(ranks)) for ranks in process_sets}
        others = _connections()
        try:
            mpi_ops.init(process_sets=list(sets.values()))
        except Exception as error:
            raise BackendUnavailableError(
                f"rank {spec.rank}: Horovod does not start with {self._controller}: {error}. "
                'Use `backend="tf"`, or rebuild it with `tfdist build-horovod`.'
            ) from error
        atexit.unregister(mpi_ops.shutdown)  # `stop` does it, from one thread at a time
        seen = (mpi_ops.rank(), mpi_ops.size())
        places = control.exchange("horovod started", list(seen), timeout=self._timeout)
        wrong = [rank for rank, place in enumerate(places) if tuple(place) != (rank, spec.size)]
        if wrong:
            raise BackendUnavailableError(
                f"Horovod must see the launcher's world of {spec.size} ranks, but on rank {wrong[0]} it reports "
                f"rank {places[wrong[0]][0]} of {places[wrong[0]][1]} (launcher {spec.launcher}, controller "
                f"{self._controller}). Rebuild it for this launcher with "
                '`tfdist build-horovod --with gloo,mpi`, or use `backend="tf"`.'
            )
        self._process_sets = sets
        # Those of an MPI lead to its daemons, too, which would end this process without a word.
        self._connections = _connections() - others if self._controller == "gloo" else set()

    def _export(self, variables: Mapping[str, str]) -> None:
        """Sets environment variables until `stop`."""
        for name, value in variables.items():
            self._replaced.setdefault(name, os.environ.get(name))
            os.environ[name] = value

    def _stop_rendezvous(self) -> None:
        if self._rendezvous is not None:
            self._rendezvous.stop()
            self._rendezvous = None


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


def _connections() -> set[tuple[int, int]]:
    """Open TCP connections of this process: file descriptor and inode, which tells whether it is still the same."""
    found = set()
    for number, inode, connection in own_sockets():
        with contextlib.suppress(OSError):
            connection.getpeername()  # a socket that listens has no peer
            found.add((number, inode))
    return found


def _bounds(timeout: float) -> dict[str, str]:
    """Horovod's own timers, so that none outlasts the world's bound or cuts a wait short."""
    seconds = max(1, round(timeout))
    return {
        "HOROVOD_STALL_CHECK_TIME_SECONDS": str(max(1, seconds // 2)),
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(seconds),
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(seconds),
    }


def _is_dynamic() -> bool:
    return os.environ.get(_DYNAMIC, "0") not in ("", "0")


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
