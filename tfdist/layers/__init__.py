"""Layers that know of the other ranks, and layers that need less memory.

Importing this package registers layers with Keras, so that `keras.models.load_model` finds them.
"""

from tfdist.layers.accumulating import accumulate_gradients
from tfdist.layers.conversion import sync_batch_norm
from tfdist.layers.memory_search import fit_in_memory
from tfdist.layers.recomputed_models import recompute_model
from tfdist.layers.recomputing import recompute
from tfdist.layers.sync_batch_normalization import SyncBatchNormalization

__all__ = [
    "SyncBatchNormalization",
    "accumulate_gradients",
    "fit_in_memory",
    "recompute",
    "recompute_model",
    "sync_batch_norm",
]
