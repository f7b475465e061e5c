"""Strategies by what the user writes: `ring`, `parameter_server(servers=2)`."""

from __future__ import annotations

import importlib
from typing import Any

from tfdist.collectives.base import Group
from tfdist.gradients import GradientReducer
from tfdist.strategies import asynchronous_roles
from tfdist.strategies.auto import Auto
from tfdist.strategies.base import Strategy
from tfdist.strategies.notation import parse
from tfdist.strategies.ring import Ring
from tfdist.world import World, current

# Name that the user writes -> class in the module of that name.
STRATEGIES = {
    "ring": "Ring",
    "parameter_server": "ParameterServer",
    "async_parameter_server": "AsyncParameterServer",
    "mirrored": "Mirrored",
    "multi_worker_mirrored": "MultiWorkerMirrored",
    "central_storage": "CentralStorage",
    "auto": "Auto",
}


def check(text: str, ranks: int) -> str:
    """Raises TfdistError unless `text` is a strategy that works with so many ranks.

    Returns:
        The strategy in a form that is equal for equal strategies.

    Example:
        >>> check("parameter_server( servers = 2 )", ranks=4)
        'parameter_server(servers=2)'
    """
    name, options = _parse(text)
    _class_of(name).check(ranks, **options)
    if not options:
        return name
    return f"{name}({', '.join(f'{key}={options[key]!r}' for key in sorted(options))})"


def dedicated(text: str) -> int:
    """How many ranks, from the first on, compute no gradients under this strategy."""
    name, options = _parse(text)
    return _class_of(name).dedicated(**options)


def option(text: str, name: str) -> Any:
    """What the user gave for an option of the strategy; None if nothing."""
    return _parse(text)[1].get(name)


def places_replicas(text: str) -> bool:
    """Whether several devices of a process compute gradients under this strategy, by `tf.distribute`."""
    return _class_of(_parse(text)[0]).places_replicas()


def distribution(text: str, here: World) -> Any:
    """A new `tf.distribute.Strategy`, where this strategy places replicas; otherwise None."""
    return _class_of(_parse(text)[0]).distribution(here)


def make(text: str, reducer: GradientReducer, group: Group) -> Strategy:
    """The strategy for the ranks of a group.

    Raises:
        TfdistError: it does not work with so many ranks.
    """
    name, options = _parse(text)
    _class_of(name).check(group.size, **options)
    if name == asynchronous_roles.NAME and current().spec.size > 1:
        return _class_of(name)(reducer, group)
    if group.size == 1 and not _class_of(name).places_replicas():
        return Ring(reducer, group)  # one rank has nothing to divide
    if name == Auto.name:
        return Auto(reducer, group, make=lambda chosen: make(chosen, reducer, group))
    return _class_of(name)(reducer, group, **options)


def _parse(text: str) -> tuple[str, dict[str, Any]]:
    return parse(text, STRATEGIES)


def _class_of(name: str) -> type[Strategy]:
    found: type[Strategy] = getattr(importlib.import_module(f"tfdist.strategies.{name}"), STRATEGIES[name])
    return found
