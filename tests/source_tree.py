"""How tests, and processes that they start, find a source tree that is not installed."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]


def expose_callbacks() -> None:
    """Makes `tfdist.callbacks` importable where packaging has not mapped it from the folder `callbacks`."""
    import tfdist

    if importlib.util.find_spec("tfdist.callbacks") is None:
        tfdist.__path__.append(str(_ROOT))


def search_path(*folders: Path | str) -> str:
    """PYTHONPATH of child processes: they find tfdist and its tests, and import TensorFlow faster."""
    return os.pathsep.join(map(str, [_ROOT / "tests" / "lean", _ROOT, *folders]))
