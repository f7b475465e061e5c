"""Strategies by what the user writes: `ring`, `parameter_server(servers=2)`."""

from __future__ import annotations

import ast
import importlib
from typing import Any

from tfdist.collectives.base import Group
from tfdist.errors import TfdistError
from tfdist.gradients import GradientReducer
from tfdist.strategies.auto import Auto
from tfdist.strategies.base import Strategy
from tfdist.strategies.ring import Ring
from tfdist.world import World

# Name that the user writes -> class in the module of that name.
STRATEGIES = {
    "ring": "Ring", "parameter_server": "ParameterServer", "auto": "Auto", "mirrored": "Mirrored",
    "multi_worker_mirrored": "MultiWorkerMirrored", "central_storage": "CentralStorage",
}  # fmt: skip


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


def places_replicas(text: str) -> bool:
    """Whether several devices of a process compute gradients under this strategy, by `tf.distribute`."""
    return _class_of(_parse(text)[0]).places_replicas()


def devices(text: str) -> int | None:
    """How many devices of a process the user has asked for."""
    found: int | None = _parse(text)[1].get("devices")
    return found


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
    if group.size == 1 and not _class_of(name).places_replicas():
        return Ring(reducer, group)  # one rank has nothing to divide
    if name == Auto.name:
        return Auto(reducer, group, make=lambda chosen: make(chosen, reducer, group))
    return _class_of(name)(reducer, group, **options)


def _parse(text: str) -> tuple[str, dict[str, Any]]:
    try:
        node = ast.parse(text.strip(), mode="eval").body
        call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
        options = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
    except (SyntaxError, ValueError):
        call, options = ast.Call(ast.Name(""), [], []), {}
    name = call.func.id if isinstance(call.func, ast.Name) else ""
    if name not in STRATEGIES or call.args:
        raise TfdistError(
            f"strategy must be one of {', '.join(STRATEGIES)}, with its options in parentheses, as in "
            f'"parameter_server(servers=2)"; received {text!r}.'
        )
    return name, options


def _class_of(name: str) -> type[Strategy]:
    found: type[Strategy] = getattr(importlib.import_module(f"tfdist.strategies.{name}"), STRATEGIES[name])
    return found
