"""Where variables are placed: the `tf.distribute.Strategy` of the current world, if it has one.

Under `ring` and `parameter_server` every rank has variables of its own, and TensorFlow places them. Other
strategies need variables to be made in the scope of a `tf.distribute.Strategy`, which `tfdist.scope()`
enters.
"""

from __future__ import annotations

from typing import Any

_distribution: Any = None


def use(distribution: Any) -> None:
    """Sets or, with None, clears the strategy of the current world; only `runtime` calls this."""
    global _distribution
    _distribution = distribution


def distribution() -> Any:
    """The `tf.distribute.Strategy` in whose scope models are made; None where they need none."""
    return _distribution
