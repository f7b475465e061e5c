"""Which devices of this process compute: counted and set up without initialising TensorFlow's context."""

from __future__ import annotations

import tensorflow as tf

from tfdist.errors import TfdistError


def prepare_devices(asked: int | None) -> int:
    """Makes the devices visible that a strategy shall use.

    Args:
        asked: how many; None for all visible GPUs, or without GPUs all logical CPU devices.

    Returns:
        How many there are.

    Raises:
        TfdistError: there are not so many, and no more can be made.
    """
    gpus = tf.config.get_visible_devices("GPU")
    if gpus:
        return _choose_gpus(gpus, asked)
    (cpu,) = tf.config.list_physical_devices("CPU")[:1]
    configured = tf.config.get_logical_device_configuration(cpu)
    present = len(configured) if configured else 1
    if asked is None or asked <= present:
        return asked or present
    try:
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * asked)
    except RuntimeError as error:
        raise TfdistError(
            f"devices={asked} divides the CPU into {asked} logical devices, which TensorFlow does before its first "
            f"operation only; it has executed one, and has {present}. Call tfdist.init() before the first "
            "TensorFlow or Keras operation of the script."
        ) from error
    return asked


def local_devices(count: int) -> list[str]:
    """Names of the devices that compute, once TensorFlow's context may be initialised."""
    kind = "GPU" if tf.config.list_logical_devices("GPU") else "CPU"
    return [f"/device:{kind}:{number}" for number in range(count)]


def _choose_gpus(gpus: list[tf.config.PhysicalDevice], asked: int | None) -> int:
    count = len(gpus) if asked is None else asked
    if count > len(gpus):
        raise TfdistError(
            f"devices={asked} asks for more GPUs than this process has, which are {len(gpus)}. Ask for fewer."
        )
    if count < len(gpus):
        tf.config.set_visible_devices(gpus[:count], "GPU")
    return count
