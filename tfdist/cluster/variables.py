"""Reading environment variables strictly: all of a group or none, whole numbers only."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tfdist.errors import LauncherError


def integers(environ: Mapping[str, str], names: list[str], *, by: str) -> list[int] | None:
    """The variables' values; None when none of them is set."""
    present = [name for name in names if environ.get(name, "").strip()]
    if not present:
        return None
    missing = [name for name in names if name not in present]
    if missing:
        raise LauncherError(
            f"{show(environ, present)}, but {', '.join(missing)} not set; {by} sets all of them. "
            "Export the missing ones, or unset the others to run alone."
        )
    wrong = [name for name in names if not re.fullmatch(r"\d{1,9}", environ[name].strip())]
    if wrong:
        raise LauncherError(
            f"{' and '.join(wrong)} must be a whole number >= 0. Received {show(environ, wrong)}."
        )
    return [int(environ[name]) for name in names]


def show(environ: Mapping[str, str], names: list[str]) -> str:
    return ", ".join(f"{name}={environ[name]}" if name in environ else f"{name} unset" for name in names)
