"""Makes ranks start equal, and proves that they stay equal."""

from tfdist.variables.broadcast import (
    broadcast_global_variables,
    broadcast_model,
    broadcast_variables,
    offset_seeds,
)
from tfdist.variables.listing import (
    agree_on_list,
    array_of,
    bytes_of,
    describe,
    model_state,
    path_of,
    tensor_of,
)
from tfdist.variables.sync import MOVING_STATISTICS, check_in_sync, differing_variables, fingerprint

__all__ = [
    "MOVING_STATISTICS",
    "agree_on_list",
    "array_of",
    "broadcast_global_variables",
    "broadcast_model",
    "broadcast_variables",
    "bytes_of",
    "check_in_sync",
    "describe",
    "differing_variables",
    "fingerprint",
    "model_state",
    "offset_seeds",
    "path_of",
    "tensor_of",
]
