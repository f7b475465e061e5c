"""Every test of this folder must leave no control thread and no open socket behind."""

from __future__ import annotations

import gc
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True, scope="module")
def no_garbage_of_other_files() -> None:
    gc.collect()


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        yield
        gc.collect()
    leaks = [str(warning.message) for warning in caught if issubclass(warning.category, ResourceWarning)]
    assert not leaks
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        left = [thread.name for thread in threading.enumerate() if thread.name.startswith("tfdist-control")]
        if not left:
            return
        time.sleep(0.02)
    raise AssertionError(f"threads left behind: {left}")


@pytest.fixture
def rendezvous(tmp_path: Path) -> str:
    return f"file://{tmp_path}/meeting/point"
