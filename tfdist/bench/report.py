"""What all subjects' command lines and reports share."""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from tfdist import resources
from tfdist.bench.figures import parse_size
from tfdist.bench.machine import describe_machine, load


def parser(subject: str, description: str) -> argparse.ArgumentParser:
    """A parser with the options that every subject has."""
    result = argparse.ArgumentParser(
        prog=f"tfdist bench {subject}", description=description, allow_abbrev=False
    )
    result.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the raw figures to FILE")
    result.add_argument(
        "--timeout", type=at_least(1), default=180, metavar="S", help="bound of every single wait (180)"
    )
    return result


def at_least(least: int) -> Callable[[str], int]:
    """A converter for argparse: whole numbers from `least` on."""

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"needs a whole number >= {least}, received {text!r}")
        return value

    return convert


def size(text: str) -> int:
    """A converter for argparse: bytes, as in 64KB."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"needs sizes like 64KB or 16MB: {error}") from error


def introduce(subject: str) -> None:
    """Prints what is measured on what."""
    print(f"tfdist bench {subject}", flush=True)
    for name, value in describe_machine().items():
        print(f"  {name:<11}{value}")


def finish(file: pathlib.Path | None, *, settings: Mapping[str, Any], figures: Mapping[str, Any]) -> None:
    """Prints the load, and writes everything to `file` if one is named."""
    print(
        f"\nLoad at the end: {load():.1f} on {resources.usable_cores()} cores, this benchmark included.",
        flush=True,
    )
    if file is not None:
        content = {"machine": describe_machine(), "load": load(), "settings": settings, "figures": figures}
        file.write_text(json.dumps(content, indent=2) + "\n")


def thread_share(size: int) -> dict[str, str]:
    """Thread settings of one of `size` ranks, as tfdist's launcher makes them."""
    from tfdist.launch.plan import Request, plan_local

    plan = plan_local(
        Request(program=("-",), size=size),
        {},
        job="-",
        secret="-",
        folder="-",
        cores=resources.usable_cores(),
    )
    return {name: value for name, value in plan.ranks[0].variables.items() if "THREADS" in name}
