"""The `tf.distribute.Strategy` of the world, where its strategy places replicas on the devices of a process.

It is made when first needed: making it initialises TensorFlow's context, which `tfdist.init()` must not, so that
device settings after it still work.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from tfdist import world
from tfdist.errors import TfdistError
from tfdist.strategies import choice

_made: tuple[world.World, Any] | None = None


def distribution() -> Any:
    """The `tf.distribute.Strategy` of this world, made at the first call; None where there is none."""
    global _made
    here = world.current()
    if _made is None or _made[0] is not here:
        _made = (here, choice.distribution(here.strategy, here))
    return _made[1]


def use(strategy: Any) -> None:
    """Takes a strategy that `init` had to make, as it connects processes; only `runtime` calls this."""
    global _made
    _made = (world.current(), strategy)


def forget() -> None:
    """Lets go of the strategy of a world that has ended."""
    global _made
    _made = None


@contextlib.contextmanager
def scope() -> Iterator[None]:
    """Inside, variables are made where the world's strategy wants them; changes nothing without one."""
    strategy = distribution()
    if strategy is None:
        yield
        return
    with strategy.scope():
        yield


def require_scope(made_under: Any, what: str) -> None:
    """Raises unless something was made inside `tfdist.scope()`.

    Args:
        made_under: the strategy that it was made under.
        what: what it is, for the message.
    """
    strategy = distribution()
    if strategy is not None and made_under is not strategy:
        found = "outside of any scope" if made_under is None else f"under {type(made_under).__name__}"
        raise TfdistError(
            f"Strategy {world.current().strategy} trains only what is made inside `with tfdist.scope():`, but "
            f"{what} was made {found}. Put building and compiling, or tfdist.load_model, into the scope."
        )
