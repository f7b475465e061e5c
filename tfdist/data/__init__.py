"""`tfdist.shard`: every rank trains on its own part of the data, and all ranks take the same steps."""

from tfdist.data.marks import is_sharded
from tfdist.data.sharding import shard

__all__ = ["is_sharded", "shard"]
