"""tfdist: distributed training for Keras 3 on TensorFlow, in ordinary `model.fit()`.

Names load on first use (PEP 562), so `import tfdist` starts nothing and imports neither TensorFlow nor
Keras: the launcher and device settings come first.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# Public name -> module that defines it.
_HOME = {
    "tfdist.runtime": ("init", "shutdown", "local", "scope", "mpi_built", "gloo_built", "nccl_built", "cuda_built",
                       "rocm_built", "ccl_built", "ddl_built", "mpi_enabled",
                       "gloo_enabled", "mpi_threads_supported", "is_homogeneous"),
    "tfdist.world": ("is_initialized", "rank", "size", "local_rank", "local_size", "cross_rank", "cross_size",
                     "replicas", "backend"),
    "tfdist.operations": ("allreduce", "grouped_allreduce", "allgather", "grouped_allgather", "broadcast",
                          "reduce", "reducescatter", "grouped_reducescatter", "alltoall", "barrier",
                          "broadcast_object", "allgather_object", "Sum", "Average", "Min", "Max", "Product",
                          "LogicalAnd", "LogicalOr", "Adasum"),
    "tfdist.process_sets": ("ProcessSet", "add_process_set", "remove_process_set", "global_process_set"),
    "tfdist.compression": ("Compression",),
    "tfdist.optimizer": ("DistributedOptimizer", "load_model"),
    "tfdist.joining": ("join",),
    "tfdist.tape": ("DistributedGradientTape",),
    "tfdist.layers": ("SyncBatchNormalization",),
    "tfdist.variables": ("broadcast_variables", "broadcast_global_variables", "check_in_sync"),
    "tfdist.data": ("shard",),
    "tfdist.inference": ("evaluate", "predict"),
    "tfdist.launch.function": ("run",),
    "tfdist.errors": ("TfdistError", "NotInitializedError", "LauncherError", "BackendUnavailableError",
                      "CollectiveError", "CollectiveMismatchError", "CollectiveTimeoutError", "PeerLostError",
                      "PeerFailedError", "OutOfSyncError"),
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}
_SUBMODULES = ("callbacks", "cost", "layers", "pipeline")

__all__ = ["__version__", *_SUBMODULES, *_MODULE_OF]


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        value = getattr(importlib.import_module(_MODULE_OF[name]), name)
        globals()[name] = value
        return value
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module 'tfdist' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
