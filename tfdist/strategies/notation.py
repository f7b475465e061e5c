"""How a strategy is written: a name, with options in parentheses, as in `parameter_server(servers=2)`.

It needs no TensorFlow, so that the launcher can read it.
"""

from __future__ import annotations

import ast
from collections.abc import Collection
from typing import Any

from tfdist.errors import TfdistError


def parse(text: str, names: Collection[str]) -> tuple[str, dict[str, Any]]:
    """Name and options of a strategy.

    Args:
        text: what the user wrote.
        names: of the strategies that there are.

    Raises:
        TfdistError: it can't be read, or is none of them.

    Example:
        >>> parse("parameter_server(servers=2)", ["ring", "parameter_server"])
        ('parameter_server', {'servers': 2})
    """
    try:
        node = ast.parse(text.strip(), mode="eval").body
        call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
        options = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
    except (SyntaxError, ValueError):
        call, options = ast.Call(ast.Name(""), [], []), {}
    name = call.func.id if isinstance(call.func, ast.Name) else ""
    if name not in names or call.args:
        raise TfdistError(
            f"strategy must be one of {', '.join(names)}, with its options in parentheses, as in "
            f'"parameter_server(servers=2)"; received {text!r}.'
        )
    return name, options
