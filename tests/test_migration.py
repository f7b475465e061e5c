"""Every public name of Horovod's Keras and TensorFlow modules is here, or listed in docs/migrating.md."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest

import tfdist
from tests.conftest import require

GUIDE = (Path(__file__).parents[1] / "docs" / "migrating.md").read_text()
MODULES = ("horovod.tensorflow.keras", "horovod.tensorflow")
CALLABLES = [
    "DistributedOptimizer", "DistributedGradientTape", "load_model", "allreduce", "allgather", "broadcast",
    "alltoall", "reducescatter", "grouped_allreduce", "broadcast_variables", "broadcast_object",
    "allgather_object", "add_process_set", "remove_process_set", "init",
]  # fmt: skip


def public_names(module: object) -> list[str]:
    return [name for name in dir(module) if name[0] != "_" and not inspect.ismodule(getattr(module, name))]


@pytest.mark.parametrize("name", MODULES)
def test_every_name_is_here_or_explained(name: str) -> None:
    require("horovod")
    module = importlib.import_module(name)
    missing = [
        each for each in public_names(module) if not hasattr(tfdist, each) and f"`{each}`" not in GUIDE
    ]
    # What the module merely imports itself is no part of Horovod.
    own = [
        each
        for each in missing
        if getattr(getattr(module, each), "__module__", "horovod").startswith("horovod")
    ]
    assert own == []


def test_every_callback_is_here() -> None:
    require("horovod")
    callbacks = importlib.import_module("horovod.tensorflow.keras.callbacks")
    own = [
        name
        for name, value in vars(callbacks).items()
        if inspect.isclass(value) and value.__module__ == callbacks.__name__
    ]
    assert len(own) >= 5
    assert [name for name in own if not hasattr(tfdist.callbacks, name)] == []


@pytest.mark.parametrize("name", CALLABLES)
def test_positional_arguments_are_horovods(name: str) -> None:
    """A call with positional arguments, written for Horovod, means the same here."""
    require("horovod")
    keras_module, core = (importlib.import_module(each) for each in MODULES)
    # Where both modules have a collective, this package follows the TensorFlow one.
    wanted = positional(
        getattr(core if hasattr(core, name) and name != "DistributedOptimizer" else keras_module, name)
    )
    ours = positional(getattr(tfdist, name))
    explained = [argument for argument in wanted if argument not in ours]
    assert all(f"`{name}({argument}=)`" in GUIDE or f"({argument}=" in GUIDE for argument in explained), (
        explained
    )
    common = [argument for argument in ours if argument in wanted]
    assert common == [argument for argument in wanted if argument in ours]


def positional(function: object) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)
    called = function.__init__ if inspect.isclass(function) else function  # type: ignore[misc]
    parameters = inspect.signature(called).parameters.values()  # type: ignore[arg-type]
    return [each.name for each in parameters if each.kind in kinds and each.name != "self"]
