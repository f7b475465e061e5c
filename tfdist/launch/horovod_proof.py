"""Proof that an installed Horovod works: a real all-reduce between two processes of this machine.

Problem: a Horovod that compiles and imports may still not communicate (no usable interface, an MPI that
can't start processes, a rank that believes it is alone). Only an all-reduce whose result needs both ranks
shows that it does.

Solution: two new Python processes, started without Horovod's launcher for Gloo (whose rendezvous listens on
every interface; this one only on loopback) and by `mpirun` for MPI. Nothing of tfdist runs in them, so that
a failure speaks about Horovod alone. Every wait has a bound.

Reference: the HTTP rendezvous protocol is that of Horovod 0.28.1, `horovod/common/gloo/http_store.cc`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.server
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from tfdist.errors import BackendUnavailableError

_MARK = "TFDIST_PROOF "

# Ranks contribute 1 and 2: only a sum over both gives 3 everywhere.
_WORKER = """
import json, sys, time
megabytes = int(sys.argv[1])
import tensorflow as tf
import horovod.tensorflow as hvd
hvd.init()
gpus = tf.config.list_physical_devices("GPU")
if hvd.nccl_built() and len(gpus) >= hvd.local_size():
    tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")
else:
    tf.config.set_visible_devices([], "GPU")
value = tf.fill([megabytes * 262144], float(hvd.rank() + 1))
total = hvd.allreduce(value, op=hvd.Sum, name="proof")
seconds = []
for step in range(5):
    start = time.perf_counter()
    hvd.allreduce(value, op=hvd.Sum, name="timed").numpy()
    seconds.append(time.perf_counter() - start)
print("\\n" + "TFDIST_PROOF " + json.dumps({
    "rank": hvd.rank(), "size": hvd.size(), "low": float(tf.reduce_min(total)),
    "high": float(tf.reduce_max(total)), "seconds": min(seconds), "device": total.device,
    "built": [n for n in ("mpi", "gloo", "nccl", "cuda") if getattr(hvd, n + "_built")()],
    "controller": "mpi" if hvd.mpi_enabled() else "gloo",
}), flush=True)
hvd.shutdown()
"""


@dataclasses.dataclass(frozen=True)
class Proof:
    """Result of one two-process all-reduce that gave the right sum on both ranks.

    Attributes:
        controller: `gloo` or `mpi`, which started and coordinated the processes.
        built: features that Horovod's own library reports.
        device: where the tensors were, `CPU` or `GPU`.
        seconds: best time of one all-reduce.
        bandwidth: bus bandwidth in bytes a second, 2(N-1)/N of the tensor's bytes over `seconds`.
    """

    controller: str
    built: tuple[str, ...]
    device: str
    seconds: float
    bandwidth: float


def prove_gloo(*, package_path: Path | None = None, megabytes: int = 16, timeout: float = 120.0) -> Proof:
    """All-reduces between two processes over loopback with Horovod's Gloo.

    Args:
        package_path: folder that holds a Horovod to prove instead of the installed one.
        megabytes: size of the tensor in MiB.
        timeout: bound in seconds for the whole proof.

    Returns:
        What was measured.

    Raises:
        BackendUnavailableError: a rank failed, gave a wrong sum, or did not end in time.
    """
    with _serve_rendezvous() as port:
        jobs = []
        for rank in range(2):
            environment = _clean_environment(package_path)
            environment.update(_gloo_settings(rank, port=port, timeout=timeout))
            jobs.append(([sys.executable, "-c", _WORKER, str(megabytes)], environment))
        outputs = _run_together(jobs, timeout=timeout, name="Gloo")
    return judge_reports("\n".join(outputs), controller="gloo", megabytes=megabytes)


def prove_mpi(
    mpirun: str, *, package_path: Path | None = None, megabytes: int = 16, timeout: float = 120.0
) -> Proof:
    """All-reduces between two processes that `mpirun` starts on this machine; as `prove_gloo`."""
    command = [*_mpirun_command(mpirun), sys.executable, "-c", _WORKER, str(megabytes)]
    environment = _clean_environment(package_path)
    environment.update(HOROVOD_CONTROLLER="mpi", HOROVOD_CPU_OPERATIONS="mpi")
    outputs = _run_together([(command, environment)], timeout=timeout, name="MPI")
    return judge_reports(outputs[0], controller="mpi", megabytes=megabytes)


def judge_reports(output: str, *, controller: str, megabytes: int) -> Proof:
    """Turns what two workers printed into a `Proof`, or says what is wrong with it."""
    reports = [json.loads(line[len(_MARK) :]) for line in output.splitlines() if line.startswith(_MARK)]
    sizes = sorted(report["size"] for report in reports)
    if sizes != [2, 2]:
        raise BackendUnavailableError(
            f"Horovod's proof needs two ranks of one world; {controller} gave worlds of size {sizes}. "
            + (
                "The mpirun that started them belongs to another MPI than Horovod was built with: "
                "use the one beside its mpicxx."
                if controller == "mpi"
                else "Rebuild with `tfdist build-horovod --rebuild`."
            )
        )
    for report in reports:
        if report["low"] != 3.0 or report["high"] != 3.0:
            raise BackendUnavailableError(
                f"Horovod ({controller}) summed 1 and 2 to {report['low']} up to {report['high']} "
                f"on rank {report['rank']}; 3 is right. Rebuild with `tfdist build-horovod --rebuild`."
            )
    seconds = max(report["seconds"] for report in reports)
    return Proof(
        controller=controller,
        built=tuple(reports[0]["built"]),
        device="GPU" if "GPU" in reports[0]["device"] else "CPU",
        seconds=seconds,
        bandwidth=megabytes * 2**20 / seconds,  # 2(N-1)/N is 1 for two ranks
    )


def _gloo_settings(rank: int, *, port: int, timeout: float) -> dict[str, str]:
    return {
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": "2",
        "HOROVOD_LOCAL_RANK": str(rank),
        "HOROVOD_LOCAL_SIZE": "2",
        "HOROVOD_CROSS_RANK": "0",
        "HOROVOD_CROSS_SIZE": "1",
        "HOROVOD_HOSTNAME": "127.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_GLOO_IFACE": "lo0" if sys.platform == "darwin" else "lo",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(max(1, int(timeout))),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }


def _clean_environment(package_path: Path | None) -> dict[str, str]:
    """This environment without settings of an outer job, which would redirect the two processes."""
    prefixes = ("HOROVOD_", "OMPI_", "PMI", "PRTE_", "SLURM_", "TFDIST_")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(prefixes)}
    for name in ("TF_CONFIG", "TF_USE_LEGACY_KERAS"):
        environment.pop(name, None)
    if package_path is not None:
        before = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join([str(package_path), *([before] if before else [])])
    environment.update(TF_CPP_MIN_LOG_LEVEL="3", OMP_NUM_THREADS="1", NO_PROXY="*", no_proxy="*")
    return environment


def _mpirun_command(mpirun: str) -> list[str]:
    version = subprocess.run(
        [mpirun, "--version"], capture_output=True, text=True, errors="replace", timeout=30
    ).stdout
    if "Open MPI" not in version and "OpenRTE" not in version:
        return [mpirun, "-n", "2"]
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [mpirun, *as_root, "--oversubscribe", "--bind-to", "none", "-np", "2"]


def find_mpirun(mpicxx: str) -> str | None:
    """The `mpirun` that belongs to a compiler wrapper, else the first on PATH, else None."""
    for name in ("mpirun", "mpiexec"):
        beside = Path(mpicxx).parent / name
        if os.access(beside, os.X_OK):
            return str(beside)
    return shutil.which("mpirun") or shutil.which("mpiexec")


def _run_together(
    jobs: Sequence[tuple[list[str], Mapping[str, str]]], *, timeout: float, name: str
) -> list[str]:
    """Runs processes at the same time and returns what they printed; ends all when one fails or is late."""
    deadline = time.monotonic() + timeout
    processes: list[subprocess.Popen[str]] = []
    with contextlib.ExitStack() as stack:
        files: list[IO[str]] = [
            stack.enter_context(tempfile.TemporaryFile("w+", errors="replace")) for _ in jobs
        ]
        stack.callback(_end_all, processes)
        for (command, environment), file in zip(jobs, files, strict=True):
            processes.append(
                subprocess.Popen(
                    command,
                    env=dict(environment),
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    text=True,
                    start_new_session=True,
                )
            )
        while True:
            codes = [process.poll() for process in processes]
            failed = next((i for i, code in enumerate(codes) if code), None)
            if failed is not None:
                raise BackendUnavailableError(
                    f"Horovod's two-process all-reduce over {name} failed: process {failed} ended with code "
                    f"{codes[failed]}. Its last words:\n{_last_words(files[failed])}"
                )
            if all(code == 0 for code in codes):
                return [_read(file) for file in files]
            if time.monotonic() > deadline:
                late = [i for i, code in enumerate(codes) if code is None]
                raise BackendUnavailableError(
                    f"Horovod's two-process all-reduce over {name} did not end within {timeout:g} s: "
                    f"process {', '.join(map(str, late))} still ran. Its last words:\n"
                    f"{_last_words(files[late[0]])}"
                )
            time.sleep(0.05)


def _end_all(processes: Sequence[subprocess.Popen[str]]) -> None:
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _read(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _last_words(file: IO[str]) -> str:
    lines = [line.rstrip() for line in _read(file).splitlines() if line.strip()]
    return "\n".join(f"    {line[:300]}" for line in lines[-20:]) or "    (nothing)"


class _Rendezvous(http.server.BaseHTTPRequestHandler):
    """Keys and values over HTTP, as Horovod's Gloo store speaks it."""

    protocol_version = "HTTP/1.1"
    server: _RendezvousServer

    def do_GET(self) -> None:
        value = self.server.values.get(self.path)
        self._answer(404 if value is None else 200, value or b"")

    def do_PUT(self) -> None:
        self.server.values[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(200)

    def do_DELETE(self) -> None:
        # A rank says good-bye; the store ends with the proof anyway.
        self._answer(200)

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Keeps requests out of the user's terminal."""


class _RendezvousServer(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Rendezvous)
        self.values: dict[str, bytes] = {}


@contextlib.contextmanager
def _serve_rendezvous() -> Iterator[int]:
    server = _RendezvousServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
