"""Warm-up and schedule callbacks: the rates of Goyal et al. (2017), set without tracing again."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.played_ranks import as_rank
from tfdist.callbacks import LearningRateScheduleCallback, LearningRateWarmupCallback

STEPS = 4


class Recorder(keras.callbacks.Callback):
    """Rate that each step uses; listed after the callback under test."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.rates.append(float(self.model.optimizer.learning_rate.numpy()))


def train(callback: Any, *, optimizer: Any = None, epochs: int = 3, **options: Any) -> Any:
    """Rates and history of a small model, trained by this process whatever the size of the world."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(optimizer or keras.optimizers.SGD(1.0), "mse")
    x = np.random.default_rng(0).normal(size=(2 * STEPS, 2)).astype("float32")
    recorder = Recorder()
    history = model.fit(
        x, x[:, :1], batch_size=2, epochs=epochs, callbacks=[callback, recorder], verbose=0, **options
    )
    return model, recorder.rates, history.history


@pytest.mark.parametrize("size", [1, 2, 4])
def test_warmup_goes_linearly_from_one_rank_to_the_world(size: int) -> None:
    with as_rank(0, size):
        _, rates, history = train(LearningRateWarmupCallback(0.08, warmup_epochs=2), epochs=3)
    done = np.minimum(np.arange(1, 3 * STEPS + 1) / (2 * STEPS), 1)
    np.testing.assert_allclose(rates, 0.08 / size * (1 + (size - 1) * done), rtol=1e-6)
    np.testing.assert_allclose(history["lr"][-1], 0.08, rtol=1e-6)
    assert history["lr"] == history["learning_rate"]


def test_warmup_says_when_it_is_over(capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(2):
        with as_rank(rank, 2):
            train(LearningRateWarmupCallback(0.08, warmup_epochs=2, verbose=1))
    assert capsys.readouterr().out.count("Epoch 2: learning rate warm-up finished at 0.08.") == 1


def test_schedule_by_staircase_between_epochs() -> None:
    callback = LearningRateScheduleCallback(0.5, lambda epoch: 0.1**epoch, start_epoch=1, end_epoch=3)
    with as_rank(0, 1):
        _, rates, history = train(callback, epochs=4)
    np.testing.assert_allclose(rates, np.repeat([1.0, 0.05, 0.005, 0.005], STEPS), rtol=1e-6)
    np.testing.assert_allclose(history["lr"], [1.0, 0.05, 0.005, 0.005], rtol=1e-6)


def test_schedule_by_a_number_decays_from_the_start_epoch() -> None:
    with as_rank(0, 1):
        _, rates, _ = train(LearningRateScheduleCallback(0.5, 0.1, start_epoch=1), epochs=3)
    np.testing.assert_allclose(rates, np.repeat([1.0, 0.5, 0.05], STEPS), rtol=1e-6)


def test_schedule_within_an_epoch_traces_once() -> None:
    callback = LearningRateScheduleCallback(1.0, lambda epoch: 1 / (1 + epoch), staircase=False)
    traces = []

    class Counting(keras.optimizers.SGD):
        def update_step(self, *arguments: Any) -> None:
            traces.append(1)
            super().update_step(*arguments)

    with as_rank(0, 1):
        _, rates, _ = train(callback, optimizer=Counting(1.0))
    np.testing.assert_allclose(rates, 1 / (1 + np.arange(3 * STEPS) / STEPS), rtol=1e-6)
    assert len(traces) == 2, "kernel and bias, once"


@pytest.mark.parametrize("make", [keras.optimizers.SGD, keras.optimizers.RMSprop])
def test_momentum_correction_continues_as_if_the_rate_had_always_been_new(make: Any) -> None:
    callback = LearningRateScheduleCallback(0.5, lambda epoch: [1, 0.1][int(epoch)])
    plain = LearningRateScheduleCallback(0.5, lambda epoch: [1, 0.1][int(epoch)], momentum_correction=False)
    velocities = []
    with as_rank(0, 1):
        for schedule in (callback, plain):
            model, _, _ = train(schedule, optimizer=make(0.5, momentum=0.9), epochs=1)
            schedule.set_model(model)
            before = [np.array(slot) for slot in model.optimizer.variables if "momentum" in slot.path]
            schedule.on_epoch_begin(1)
            after = [np.array(slot) for slot in model.optimizer.variables if "momentum" in slot.path]
            velocities.append((before, after))
    for before, after in zip(*velocities[0], strict=True):
        assert np.abs(before).max() > 0
        np.testing.assert_allclose(after, 0.1 * before, rtol=1e-6)
    for before, after in zip(*velocities[1], strict=True):
        np.testing.assert_array_equal(after, before)


def test_momentum_correction_reaches_through_loss_scaling() -> None:
    inner = keras.optimizers.SGD(0.5, momentum=0.9)
    callback = LearningRateScheduleCallback(0.5, lambda epoch: [1, 0.1][int(epoch)])
    with as_rank(0, 1):
        model, _, _ = train(callback, optimizer=keras.optimizers.LossScaleOptimizer(inner), epochs=1)
        before = np.array(inner.momentums[0])
        callback.set_model(model)
        callback.on_epoch_begin(1)
    np.testing.assert_allclose(inner.momentums[0], 0.1 * before, rtol=1e-6)
    assert float(inner.learning_rate.numpy()) == pytest.approx(0.05)


def test_what_cannot_be_scheduled_says_why() -> None:
    decay = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    with as_rank(0, 1):
        with pytest.raises(ValueError, match="follows a ExponentialDecay"):
            train(LearningRateWarmupCallback(0.1), optimizer=keras.optimizers.SGD(decay))
        with pytest.raises(ValueError, match="initial_lr"):
            LearningRateScheduleCallback(None, 0.1)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="warmup_epochs"):
            LearningRateWarmupCallback(0.1, warmup_epochs=0)


def test_unknown_length_wants_steps_per_epoch() -> None:
    data = tf.data.Dataset.from_tensor_slices((np.ones((8, 2)), np.ones((8, 1)))).batch(2)
    data = data.filter(lambda *_: True)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    with as_rank(0, 2):
        with pytest.raises(ValueError, match="steps_per_epoch"):
            model.fit(data, callbacks=[LearningRateWarmupCallback(0.1)], verbose=0)
        model.fit(data, callbacks=[LearningRateWarmupCallback(0.1, 1, steps_per_epoch=4)], verbose=0)
    assert float(model.optimizer.learning_rate.numpy()) == pytest.approx(0.1)
