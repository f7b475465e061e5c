"""Methods of one model that are others for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any


@contextlib.contextmanager
def replaced(model: Any, methods: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Inside, `model` has these methods; past Keras's `__setattr__`, which would track them."""
    before = {name: model.__dict__[name] for name in methods if name in model.__dict__}  # the user's
    model.__dict__.update(methods)
    try:
        yield
    finally:
        for name in methods:
            del model.__dict__[name]
        model.__dict__.update(before)
