"""Layers that know of the other ranks.

Importing this package registers them with Keras, so that `keras.models.load_model` finds them.
"""

from tfdist.layers.conversion import sync_batch_norm
from tfdist.layers.sync_batch_normalization import SyncBatchNormalization

__all__ = ["SyncBatchNormalization", "sync_batch_norm"]
