"""`Pipeline`: a Keras model that trains another one in stages on several devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_compat.device_placement import find_moved, move_variable, place_slots
from tfdist.keras_compat.functional_graphs import graph_of
from tfdist.keras_compat.replaced import replaced
from tfdist.pipeline.plan import make_plan
from tfdist.pipeline.schedule import SCHEDULES
from tfdist.pipeline.stages import run_in_stages

_RUN_HERE = ("gpipe", "naive")
_COMPILED = ("optimizer", "compiled", "_compile_config", "_compile_loss", "_compile_metrics", "_loss_tracker")


class Pipeline(keras.Model):  # type: ignore[misc, unused-ignore]
    """Cuts a model into stages on several devices of this process, and trains it in ordinary `fit()`.

    The batch goes through the stages in micro-batches, so that stages work at the same time. Stages keep their
    inputs, and compute activations again in the backward pass, one micro-batch at a time. The loss, the metrics and
    the optimizer see the whole batch: weights are those of the model trained without a pipeline, whatever the loss,
    the sample weights, the clipping. Without a gradient, as in `evaluate` and `predict`, the batch goes through the
    stages as a whole.

    BatchNormalization normalizes each micro-batch, as in GPipe, and updates its moving statistics for each. Random
    layers draw for each micro-batch. XLA can't compile a step on several devices.

    The model shares its weights with the pipeline, and its variables, and the optimizer's slots, are moved to the
    devices of their stages. `save` and `save_weights` write the files of the model itself, which load in plain
    Keras.

    Args:
        model: a Functional or built Sequential model; or a list of layers, of which the first is a `keras.Input`.
            It is changed in place: it runs in stages from now on.
        stages: number of stages, at least 1.
        micro_batches: number of micro-batches of a batch, at least 1.
        schedule: "gpipe", or "naive", which has one micro-batch. The others of `tfdist.pipeline.schedule` need a
            process for each stage, which doesn't exist yet.
        balance: what the stages shall have equal shares of: "time", measured here; "memory", of weights, gradients,
            slots and activations; or "parameters". Or names of the layers with which stages 1, 2, ... begin.
        devices: of the stages, such as `["GPU:0", "GPU:1"]`; may name a device twice. By default all GPUs, or, if
            there are none, all logical CPU devices, which must be as many as stages.
        batch_size: rows of the batches for which time and memory are measured.

    Attributes:
        model: the model, as Keras knows it.
        plan: what is on which stage; `print(pipe.plan)`.
        devices: of the stages.

    Raises:
        TypeError: no model.
        ValueError: a model that has no graph or can't be cut so, an unknown schedule or balance, too few devices.

    Example:
        >>> import keras, tfdist
        >>> layers = [keras.Input((8,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(1)]
        >>> pipe = tfdist.pipeline.Pipeline(layers, stages=2, micro_batches=4, devices=["CPU:0", "CPU:0"])
        >>> pipe.compile(keras.optimizers.Adam(1e-3), loss="mse")

    Reference:
        Huang et al. 2019, "GPipe"; Kim et al. 2020, "torchgpipe".
    """

    def __init__(
        self,
        model: Any,
        *,
        stages: int,
        micro_batches: int,
        schedule: str = "gpipe",
        balance: str | Sequence[str] = "time",
        devices: Sequence[str] | None = None,
        batch_size: int = 32,
    ) -> None:
        _check_schedule(schedule, micro_batches)
        model = keras.Sequential(list(model)) if isinstance(model, list | tuple) else model
        functional = _graph_of(model)
        order = SCHEDULES[schedule](stages, micro_batches)
        chosen = _devices(stages, devices)
        super().__init__(name=f"{model.name}_pipeline")
        self.plan = make_plan(functional, order, balance, -(-batch_size // micro_batches))
        self.devices = tuple(chosen)
        self.model = model
        self.supports_jit = False
        self.built = True
        parts = run_in_stages(model, functional, self.plan.ends, chosen, micro_batches)
        model.train_function = model.test_function = model.predict_function = None
        for part, device in zip(parts, chosen, strict=True):
            for variable in {id(each): each for layer in part.layers for each in layer.variables}.values():
                move_variable(variable, device)
        if getattr(model, "optimizer", None) is not None:
            find_moved(model.optimizer)

    @property
    def output_names(self) -> Any:
        """Names of the model's outputs, by which losses and metrics are given and logged."""
        return graph_of(self.model).output_names

    def call(self, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        """The model's outputs."""
        options = {} if mask is None else {"mask": mask}
        return self.model(inputs, training=training, **options)

    def compile(self, *args: Any, **options: Any) -> None:
        """As `keras.Model.compile`; slots will be on the devices of their variables.

        Raises:
            ValueError: `jit_compile=True`.
        """
        if options.get("jit_compile") is True:
            raise ValueError(
                "XLA compiles for one device, and a pipeline has several; received jit_compile=True. Leave it out."
            )
        super().compile(*args, **options)
        place_slots(self.optimizer)

    def save(self, filepath: Any, *args: Any, **options: Any) -> Any:
        """Writes the model, with this pipeline's optimizer, as plain Keras does."""
        with replaced(self.model, self._training_state()):
            return self.model.save(filepath, *args, **options)

    def save_weights(self, filepath: Any, *args: Any, **options: Any) -> Any:
        """Writes the weights of the model."""
        with replaced(self.model, self._training_state()):
            return self.model.save_weights(filepath, *args, **options)

    def load_weights(self, filepath: Any, *args: Any, **options: Any) -> Any:
        """Reads the weights of the model, from a file of any pipeline or of plain Keras."""
        with replaced(self.model, self._training_state()):
            return self.model.load_weights(filepath, *args, **options)

    def _training_state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _COMPILED} if self.compiled else {}


def _check_schedule(schedule: str, micro_batches: int) -> None:
    if schedule not in _RUN_HERE:
        raise ValueError(
            f"Stages in one process run by the schedules {', '.join(map(repr, _RUN_HERE))}; received {schedule!r}."
        )
    if schedule == "naive" and micro_batches != 1:
        raise ValueError(
            f"The naive schedule has no micro-batches; received micro_batches={micro_batches}. Give 1, or 'gpipe'."
        )


def _graph_of(model: Any) -> Any:
    if not isinstance(model, keras.Model):
        raise TypeError(f"Pipeline takes a keras.Model or a list of layers; received {model!r}.")
    functional = graph_of(model)
    if functional is None:
        raise ValueError(
            f"Pipeline cuts Functional and built Sequential models; received {type(model).__name__} "
            f"{model.name!r}, which has no graph of layers. Begin it with keras.Input(shape), or give the list of "
            "its layers, first keras.Input(shape)."
        )
    return functional


def _devices(stages: int, devices: Sequence[str] | None) -> list[str]:
    present = [each.name for kind in ("GPU", "CPU") for each in tf.config.list_logical_devices(kind)]
    if devices is None:
        gpus = [name for name in present if "GPU" in name]
        devices = gpus or present
        if len(devices) < stages:
            raise ValueError(
                f"Each stage has a device of its own; received stages={stages} on a process with {len(devices)}: "
                f"{', '.join(devices)}. Take fewer stages, or divide the CPU before TensorFlow starts "
                "(tf.config.set_logical_device_configuration), or name devices twice: devices=[...]."
            )
        return list(devices[:stages])
    unknown = [name for name in devices if not any(each.endswith(name.lstrip("/")) for each in present)]
    if len(devices) != stages or unknown:
        raise ValueError(
            f"`devices` names the device of each stage, {stages} of {', '.join(present)}; received "
            f"{list(devices)!r}, of which {unknown!r} are unknown."
        )
    return list(devices)
