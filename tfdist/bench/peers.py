"""Starts what tfdist is compared with, on the rank's side: raw Horovod, and TensorFlow's own strategy.

Both must know addresses of all ranks before they start. These pass through the bench's channel, so that no
port has to be guessed; everything stays on this machine.
"""

from __future__ import annotations

import json
import os
from typing import Any

from tfdist.bench.ranks import PATIENCE, Channel
from tfdist.collectives import tf_server
from tfdist.collectives.horovod_rendezvous import Rendezvous

_LOOPBACK = "127.0.0.1"


def start_horovod(channel: Channel, *, size: int) -> Any:
    """Initialises Horovod over Gloo as its own launcher would.

    Args:
        channel: of this rank; all ranks call.
        size: number of ranks.

    Returns:
        The module `horovod.tensorflow`.
    """
    port = Rendezvous(_LOOPBACK).port if channel.rank == 0 else 0
    port = channel.exchange(port)[0]
    os.environ.update(
        HOROVOD_RANK=str(channel.rank),
        HOROVOD_SIZE=str(size),
        HOROVOD_LOCAL_RANK=str(channel.rank),
        HOROVOD_LOCAL_SIZE=str(size),
        HOROVOD_CROSS_RANK="0",
        HOROVOD_CROSS_SIZE="1",
        HOROVOD_CONTROLLER="gloo",
        HOROVOD_CPU_OPERATIONS="gloo",
        HOROVOD_HOSTNAME=_LOOPBACK,
        HOROVOD_GLOO_RENDEZVOUS_ADDR=_LOOPBACK,
        HOROVOD_GLOO_RENDEZVOUS_PORT=str(port),
        HOROVOD_GLOO_IFACE="lo",
        # Its default, 30 s, would count the time that the rank was stopped while others took their turns.
        HOROVOD_GLOO_TIMEOUT_SECONDS=str(PATIENCE),
    )
    import horovod.tensorflow as hvd

    hvd.init()
    if hvd.size() != size:
        raise RuntimeError(f"Horovod reports {hvd.size()} ranks of {size}: was it built with Gloo?")
    return hvd


def start_multi_worker(channel: Channel) -> Any:
    """A `MultiWorkerMirroredStrategy` over all ranks; all ranks call."""
    addresses = channel.exchange(f"{_LOOPBACK}:{tf_server.reserve_port()}")
    os.environ["TF_CONFIG"] = json.dumps(
        {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": channel.rank}}
    )
    import tensorflow as tf

    return tf.distribute.MultiWorkerMirroredStrategy()
