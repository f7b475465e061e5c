"""Keras callbacks for worlds of several ranks; import them as `tfdist.callbacks`."""

from tfdist.callback_roles import every_rank
from tfdist.callbacks.best_model_checkpoint import BestModelCheckpoint
from tfdist.callbacks.broadcast_global_variables import BroadcastGlobalVariablesCallback
from tfdist.callbacks.defaults import default
from tfdist.callbacks.desync_check import DesyncCheckCallback
from tfdist.callbacks.learning_rate_schedule import LearningRateScheduleCallback
from tfdist.callbacks.learning_rate_warmup import LearningRateWarmupCallback
from tfdist.callbacks.metric_average import MetricAverageCallback

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "DesyncCheckCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "default",
    "every_rank",
]
