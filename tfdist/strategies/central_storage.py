"""`central_storage`: one process, variables on one device, compute on many ("DataParallel").

Weights and optimizer slots exist once, on the CPU where there are several devices; every replica reads them, and
the first one makes the update. What replicas change in the forward pass (metrics, moving statistics, random states)
is kept by each of them, and combined when it is read: TensorFlow would add their assignments up, or refuse them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist import keras_compat, world
from tfdist.strategies.devices import local_devices
from tfdist.strategies.replicated import Replicated

_NONE = tf.VariableAggregation.NONE


class CentralStorage(Replicated):
    """Every device computes gradients of its rows; weights and slots are on one device, and updated once."""

    name = "central_storage"

    @classmethod
    def distribution(cls, here: world.World) -> Any:
        devices = local_devices(here.devices)
        parameters = devices[0] if len(devices) == 1 else "/device:CPU:0"
        strategy = tf.distribute.experimental.CentralStorageStrategy(devices, parameters)
        if len(devices) > 1:
            extended = strategy.extended
            extended._create_variable = _creator(strategy, extended._create_variable)
        return strategy

    def _updates_here(self, number: int) -> bool:
        return number == 0


def _creator(strategy: Any, create_once: Callable[..., Any]) -> Callable[..., Any]:
    from tensorflow.python.distribute import values

    def create(next_creator: Callable[..., Any], **options: Any) -> Any:
        aggregation = options.pop("aggregation", None) or _NONE
        on_read = options.get("synchronization") is tf.VariableSynchronization.ON_READ
        is_state = aggregation is _NONE and not options.get("trainable") and not keras_compat.is_slot()
        if not (on_read or is_state):
            return create_once(next_creator, **options, aggregation=_combining(aggregation, options))
        options.pop("synchronization", None)
        copies: list[Any] = []
        for device in strategy.extended.worker_devices:
            if copies:
                options["initial_value"] = copies[0].read_value()
            with tf.device(device):
                copies.append(next_creator(**options))
        aggregation = _combining(aggregation, {"dtype": copies[0].dtype})
        return values.SyncOnReadVariable(strategy, copies, aggregation)

    return create


def _combining(aggregation: Any, options: dict[str, Any]) -> Any:
    if aggregation is not _NONE:
        return aggregation
    floats = tf.as_dtype(options.get("dtype") or tf.float32).is_floating
    return tf.VariableAggregation.MEAN if floats else tf.VariableAggregation.ONLY_FIRST_REPLICA
