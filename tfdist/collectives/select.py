"""The only chooser of an engine: every rank offers facts at start-up, and all draw the same conclusion.

A choice made by each rank alone can differ (one host lacks Horovod), and then ranks wait for each other in
different libraries. So a rank first tells what it has (`offer`, which travels with the start-up barrier), and
decides only once it knows everybody's (`choose`). Neither initialises TensorFlow's context.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tfdist.cluster import ClusterSpec
from tfdist.collectives import tf_server
from tfdist.collectives.base import Engine
from tfdist.collectives.horovod_probe import explain_import_error, installed_horovod
from tfdist.collectives.horovod_start import HorovodRuntime, choose_controller
from tfdist.errors import BackendUnavailableError, LauncherError

if TYPE_CHECKING:
    from tfdist.control import ControlPlane

DYNAMIC = "dynamic"
"""What ranks offer as their process sets if they may add some later."""

_FIX = 'Run `tfdist build-horovod` there, or use `backend="tf"`.'


def offer(spec: ClusterSpec, backend: str, timeout: float) -> dict[str, Any]:
    """What the other ranks must know of this one before an engine is chosen.

    Args:
        spec: place of this process.
        backend: what this rank was asked for: `auto`, `tf`, `horovod` or `single`.
        timeout: bound in seconds of the world's waits.

    Returns:
        JSON values: the requested backend, Horovod's state, and the address reserved for TensorFlow's server.
    """
    facts: dict[str, Any] = {"backend": backend, "tf_host": tf_server.own_address(spec)}
    if not spec.addresses:
        facts["tf_port"] = tf_server.reserve_port()
    facts["tf_context"] = tf_server.context_exists()
    facts["horovod"] = (
        _horovod_state(spec) if backend in ("auto", "horovod") else {"problem": "not asked for"}
    )
    facts["nccl"] = _has_nccl()
    return facts


def choose(spec: ClusterSpec, control: ControlPlane | None, *, backend: str, timeout: float) -> Engine:
    """The engine of this world, the same on every rank; all ranks call it after the start-up barrier.

    Args:
        spec: place of this process.
        control: connected to all ranks; None at size 1.
        backend: `auto`, `tf`, `horovod` or `single`.
        timeout: bound in seconds of the world's waits.

    Raises:
        BackendUnavailableError: a rank lacks the backend; names ranks, reasons and the fix.
        LauncherError: ranks ask for different backends.
    """
    if spec.size == 1:
        from tfdist.collectives.single import SingleEngine

        return SingleEngine()
    if control is None:
        raise LauncherError(f"a world of {spec.size} ranks needs a control channel; received None.")
    roster = control.roster
    asked = [str(facts["backend"]) for facts in roster]
    if len(set(asked)) > 1:
        raise LauncherError(
            "All ranks must ask for the same backend; received "
            + ", ".join(f"{name} on rank {rank}" for rank, name in enumerate(asked))
            + ". Give the same `backend=` (or `--backend`) everywhere."
        )
    if any(facts["process_sets"] != roster[0]["process_sets"] for facts in roster):
        raise LauncherError(
            "All ranks must give the same process sets to init; received "
            + ", ".join(f"{facts['process_sets']} on rank {rank}" for rank, facts in enumerate(roster))
            + "."
        )
    if backend == "single":
        raise BackendUnavailableError(
            f'backend="single" is for worlds of one rank, this one has {spec.size}. Use "auto", "tf" or "horovod".'
        )
    problems = {rank: facts["horovod"]["problem"] for rank, facts in enumerate(roster)}
    lacking = {rank: problem for rank, problem in problems.items() if problem}
    if backend == "horovod" and lacking:
        raise BackendUnavailableError(
            'backend="horovod" needs a usable Horovod on every rank: '
            + "; ".join(f"rank {rank}: {problem}" for rank, problem in lacking.items())
            + f". {_FIX}"
        )
    if backend == "horovod" or (backend == "auto" and not lacking):
        return _start_horovod(spec, control, timeout)
    return _start_tf(spec, control, timeout)


def _start_horovod(spec: ClusterSpec, control: ControlPlane, timeout: float) -> Engine:
    from tfdist.collectives.horovod_collectives import HorovodCollectives

    states = [facts["horovod"] for facts in control.roster]
    gloo, mpi = all(state["gloo"] for state in states), all(state["mpi"] for state in states)
    controller = choose_controller(spec, gloo=gloo, mpi=mpi)
    runtime = HorovodRuntime(spec, control, controller=controller, timeout=timeout)
    asked = control.roster[0]["process_sets"]
    dynamic = asked == DYNAMIC
    runtime.start([] if dynamic else [tuple(ranks) for ranks in asked], dynamic=dynamic)
    return HorovodCollectives(spec, runtime)


def _start_tf(spec: ClusterSpec, control: ControlPlane, timeout: float) -> Engine:
    from tfdist.collectives.tf_collectives import TfCollectives

    addresses = spec.addresses or [f"{facts['tf_host']}:{facts['tf_port']}" for facts in control.roster]
    tf_server.configure_server(addresses, rank=spec.rank)
    nccl = all(facts["nccl"] for facts in control.roster)
    return TfCollectives(spec, control, timeout=timeout, nccl=nccl)


def _horovod_state(spec: ClusterSpec) -> dict[str, Any]:
    """Whether Horovod runs here, and with what."""
    build = installed_horovod()
    if build is None:
        return {"problem": "Horovod is not installed"}
    if build.problem:
        return {"problem": build.problem}
    try:
        from horovod.tensorflow import mpi_ops
    except Exception as error:
        return {"problem": explain_import_error(str(error), built_for=build.tensorflow)}
    gloo, mpi = bool(mpi_ops.gloo_built()), bool(mpi_ops.mpi_built())
    problem = ""
    if not choose_controller(spec, gloo=gloo, mpi=mpi):
        problem = f"Horovod was built without Gloo, and the launcher {spec.launcher} does not start MPI"
    return {"problem": problem, "gloo": gloo, "mpi": mpi, "nccl": bool(mpi_ops.nccl_built())}


def _has_nccl() -> bool:
    """Whether TensorFlow's collectives can run over NCCL here: built with CUDA, and a GPU is present."""
    import tensorflow as tf

    return bool(tf.test.is_built_with_cuda() and tf.config.list_physical_devices("GPU"))
