"""The train function of models that workers train (Keras >= 3.3).

`Model.make_train_function` makes a function that runs a step where it is called and returns its logs. Here it makes
one that takes batches from the iterator for several steps ahead, and returns the logs of those that are done.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

MakeFunction = Callable[[Any], Callable[[Any], Any] | None]


def scheduled_make_train_function(original: Callable[..., Any], make: MakeFunction) -> Callable[..., Any]:
    """`Model.make_train_function`; `make(model)` returns the function, or None where Keras's own will do."""

    def make_train_function(self: Any, force: bool = False) -> Any:
        if self.train_function is None or force:
            self.train_function = make(self)
            if self.train_function is None:
                original(self, force=True)
        return self.train_function

    return make_train_function


def fit_on_other_data(original: Callable[..., Any], replace: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """`Model.fit` on what `replace(model, x)` returns.

    Class weights stay with the data that have the classes in them.
    """

    @functools.wraps(original)
    def fit(self: Any, x: Any = None, *args: Any, **options: Any) -> Any:
        # By place it is the ninth after x.
        weighted = options.get("class_weight") is not None or len(args) > 8
        return original(self, x if weighted else replace(self, x), *args, **options)

    return fit
