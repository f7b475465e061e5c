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
        return tf.distribute.MirroredStrategy(local_devices(here.devices))
