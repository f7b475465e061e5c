"""Model parallel: a model cut into stages, through which the batch flows in micro-batches."""
