"""The processes of a world with parameter servers: those that serve, and the chief that uses them.

Each process reserves a port before the ranks meet, and tells it in its hello (see `collectives.tf_server`), so no
port can be lost between choosing and using it. Servers and workers start TensorFlow's server and tell the others;
then the chief connects. From then on they do what the chief's TensorFlow asks them over gRPC, and look at the
control channel only for the end: rank 0 leaves in order (exit code 0), or the world has failed.
"""

from __future__ import annotations

import sys
from typing import Any, NoReturn

from tfdist.cluster import ClusterSpec
from tfdist.collectives.loopback import keep_to_loopback
from tfdist.control import ControlPlane
from tfdist.errors import BackendUnavailableError, PeerLostError
from tfdist.strategies.asynchronous_roles import NAME, Roles

_UP = f"starting the servers of {NAME}"


def refuse_backend(backend: str) -> None:
    """Raises BackendUnavailableError for an engine that has no parameter servers of TensorFlow's kind."""
    if backend not in ("auto", "tf"):
        raise BackendUnavailableError(
            f"Strategy {NAME} runs on TensorFlow's own engine; received backend={backend!r}. Use "
            'backend="tf" (or "auto"), or a strategy that runs on Horovod: "ring", "parameter_server".'
        )


def serve(spec: ClusterSpec, roles: Roles, control: ControlPlane) -> NoReturn:
    """Serves until the chief leaves the world, then exits with code 0.

    Raises:
        TfdistError: the world has failed, as by the chief's end.
        BackendUnavailableError: TensorFlow can't start its server.
        SystemExit: the job is over.
    """
    import tensorflow as tf

    job, task = roles.task(spec.rank)
    try:
        try:
            tf.distribute.Server(_cluster(roles, control), job_name=job, task_index=task, protocol="grpc")
        except tf.errors.OpError as error:
            raise BackendUnavailableError(
                f"rank {spec.rank}, {job} {task}: TensorFlow could not start its server: {error.message}"
            ) from error
        _keep_local(spec, control)
        control.exchange(_UP, None)
        control.wait_for_end()
    except BaseException as error:
        control.close(error=f"{type(error).__name__}: {error}")
        raise
    control.close()
    sys.stdout.flush()
    sys.exit(0)


def connect(spec: ClusterSpec, roles: Roles, control: ControlPlane) -> Any:
    """On the chief: TensorFlow's `ParameterServerStrategy`, connected to all servers and workers.

    It initialises TensorFlow's context, so device settings of the chief come before `tfdist.init()`.

    Raises:
        BackendUnavailableError: TensorFlow can't connect.
        CollectiveTimeoutError: a server did not start in time.
    """
    import tensorflow as tf

    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        _cluster(roles, control), rpc_layer="grpc", task_type="chief", task_id=0
    )
    control.exchange(_UP, None)
    try:
        distribution = tf.distribute.ParameterServerStrategy(resolver)
    except (tf.errors.OpError, RuntimeError) as error:
        raise BackendUnavailableError(
            f"rank 0: TensorFlow could not connect to its servers: {error}. Call tfdist.init() before the first "
            "TensorFlow or Keras operation, model or dataset of the script."
        ) from error
    _keep_local(spec, control)
    return distribution


def explain_loss(control: ControlPlane, error: BaseException | None = None) -> PeerLostError:
    """What to raise on the chief when a server is gone."""
    known = str(control.failure or error or "A parameter server is gone.")
    return PeerLostError(
        f"{known} It kept a part of the model, so training can't go on. Start the job again: with "
        "keras.callbacks.BackupAndRestore(folder) among the callbacks, fit() resumes from the last backup."
    )


def _cluster(roles: Roles, control: ControlPlane) -> Any:
    import tensorflow as tf

    places = [f"{facts['tf_host']}:{facts['tf_port']}" for facts in control.roster]
    return tf.train.ClusterSpec(
        {
            "chief": [places[0]],
            "ps": [places[rank] for rank in roles.servers],
            "worker": [places[rank] for rank in roles.workers],
        }
    )


def _keep_local(spec: ClusterSpec, control: ControlPlane) -> None:
    if spec.cross_size == 1 and not keep_to_loopback(int(control.roster[spec.rank]["tf_port"])):
        print(
            f"tfdist: rank {spec.rank}: this kernel does not keep TensorFlow's server to loopback, so its port is "
            "open to whoever reaches this host. Use it behind a firewall.",
            file=sys.stderr,
            flush=True,
        )
