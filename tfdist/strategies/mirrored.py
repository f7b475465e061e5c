"""`mirrored`: one process, every device has a copy of all variables (tf.distribute.MirroredStrategy)."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist import world
from tfdist.strategies.devices import local_devices
from tfdist.strategies.replicated import Replicated


class Mirrored(Replicated):
    """Every device computes gradients of its rows and updates its own copy of the weights and slots."""

    name = "mirrored"

    @classmethod
    def distribution(cls, here: world.World) -> Any:
        devices = local_devices(here.devices)
        # On CPUs TensorFlow would take collectives, whose keys clash with those of an earlier strategy of this
        # process ("Shape mismatch in the collective instance"); devices of one host need none.
        on_cpu = all("CPU" in device for device in devices)
        return tf.distribute.MirroredStrategy(
            devices, cross_device_ops=tf.distribute.ReductionToOneDevice() if on_cpu else None
        )
