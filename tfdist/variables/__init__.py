"""Makes ranks start equal, and proves that they stay equal."""

from tfdist.variables.broadcast import (
    broadcast_global_variables,
    broadcast_model,
    broadcast_variables,
    offset_seeds,
)
from tfdist.variables.sync import MOVING_STATISTICS, check_in_sync, fingerprint

__all__ = [
    "MOVING_STATISTICS",
    "broadcast_global_variables",
    "broadcast_model",
    "broadcast_variables",
    "check_in_sync",
    "fingerprint",
    "offset_seeds",
]
