"""Lets tests run from a source tree that is not installed: `tfdist.callbacks` lives in the folder `callbacks`."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def expose_callbacks() -> None:
    """Makes `tfdist.callbacks` importable where packaging has not mapped it."""
    import tfdist

    if importlib.util.find_spec("tfdist.callbacks") is None:
        tfdist.__path__.append(str(Path(__file__).resolve().parents[1]))
