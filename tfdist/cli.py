"""The `tfdist` command: one lazily imported module per subcommand, so that none pays for another."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from tfdist.errors import TfdistError

# Name -> (module with `main(argv) -> int`, what it does). Arguments after the name belong to the module.
_COMMANDS = {
    "run": ("tfdist.launch.run", "run a script as several processes that train together"),
    "doctor": ("tfdist.doctor", "check this installation and print what a maintainer would ask for"),
    "build-horovod": ("tfdist.launch.build_horovod", "build and install the fast engine for this TensorFlow"),
    "bench": ("tfdist.bench", "measure collectives and training"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `tfdist ...`.

    Args:
        argv: words after the program's name; default: this process's.

    Returns:
        The exit code: 0 for success, 2 for a command line that cannot be understood.

    Example:
        >>> main(["--version"])  # doctest: +SKIP
        tfdist 0.1.0
        0
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help())
        return 0 if words else 2
    name, *rest = words
    if name in ("--version", "-V"):
        print(f"tfdist {importlib.import_module('tfdist').__version__}")
        return 0
    if name not in _COMMANDS:
        print(f"tfdist: error: there is no command {name!r}.\n\n{_help()}", file=sys.stderr)
        return 2
    try:
        return int(importlib.import_module(_COMMANDS[name][0]).main(rest))
    except TfdistError as error:
        print(f"tfdist {name}: error: {error}", file=sys.stderr)
        return 1


def _help() -> str:
    lines = [f"  {name:<14} {what}" for name, (_, what) in _COMMANDS.items()]
    return "\n".join(
        [
            "usage: tfdist COMMAND ...",
            "",
            *lines,
            "",
            "`tfdist COMMAND --help` explains a command; --version prints it.",
        ]
    )
