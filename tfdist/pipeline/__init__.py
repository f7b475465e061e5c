"""Model parallel: a model cut into stages, through which the batch flows in micro-batches."""

from tfdist.pipeline.engine import Pipeline
from tfdist.pipeline.pins import stage

__all__ = ["Pipeline", "stage"]
