"""`multi_worker_mirrored`: one worker per rank, mirrored on all their devices (MultiWorkerMirroredStrategy).

TensorFlow would read TF_CONFIG and start a server of its own. The `tf` engine has one already, on a port that it
has reserved, with a context set up for collectives; the strategy's collectives run there, with keys of their own.
"""

from __future__ import annotations

import itertools
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import collective_all_reduce_strategy, distribute_lib

from tfdist import world
from tfdist.collectives import tf_server
from tfdist.strategies.devices import local_devices
from tfdist.strategies.mirrored import Mirrored
from tfdist.strategies.replicated import Replicated

# Group keys, far above those that the engine's control channel hands out; each strategy of a process has its own.
_first_keys = itertools.count(1 << 24, 1 << 10)


class MultiWorkerMirrored(Replicated):
    """Every device of every rank computes gradients of its rows and updates its own copy of everything."""

    name = "multi_worker_mirrored"
    is_one_process = False

    @classmethod
    def distribution(cls, here: world.World) -> Any:
        if here.spec.size == 1:
            return Mirrored.distribution(here)
        here.engine.start()  # the servers of all ranks are up
        return _OnEngine(here.devices)


class _OnEngine(tf.distribute.MultiWorkerMirroredStrategy):  # type: ignore[misc]
    """MultiWorkerMirroredStrategy on the server of the `tf` engine."""

    def __init__(self, devices: int) -> None:
        self._collective_key_base = next(_first_keys)
        cluster, task = tf_server.configured_cluster()
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(cluster), task_type=tf_server.JOB, task_id=task, rpc_layer="grpc"
        )
        options = tf.distribute.experimental.CommunicationOptions()
        distribute_lib.Strategy.__init__(self, _Extended(self, resolver, options, devices))


class _Extended(collective_all_reduce_strategy.CollectiveAllReduceExtended):  # type: ignore[misc]
    _local_or_standalone_client_mode = True  # "there is a server already"
    _enable_check_health = False  # tfdist's heartbeat does that

    def __init__(self, strategy: Any, resolver: Any, options: Any, devices: int) -> None:
        self._count = devices
        super().__init__(strategy, cluster_resolver=resolver, communication_options=options)

    def _initialize_local_devices(self, cluster_resolver: Any, worker_device: str) -> tuple[Any, str]:
        names = local_devices(self._count)
        return tuple(f"{worker_device}{name}" for name in names), names[0].split(":")[1]
