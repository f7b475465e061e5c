"""`tfdist bench start`: what importing tfdist and its launcher add to a program's start."""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence

import tfdist
from tfdist.bench import report
from tfdist.bench.figures import table
from tfdist.errors import TfdistError

# Within one process: the difference of two processes' times would drown in the seconds of importing Keras.
_IMPORTS = """
import time
begin = time.perf_counter()
import keras
middle = time.perf_counter()
import tfdist
end = time.perf_counter()
tfdist.init
first_name = time.perf_counter()
print(f"\\nTFDIST_START {middle - begin} {end - middle} {first_name - end}")
"""
_PROGRAM = "print('done')\n"

_LIMITS = {"import tfdist": 0.050, "tfdist run -np 1": 0.5}


def main(argv: Sequence[str]) -> int:
    """Command line of `tfdist bench start`; see `tfdist.bench.main`."""
    options = _parser().parse_args(argv)
    report.introduce("start")
    imports = _time_imports(options)
    programs = _time_programs(options)
    added = {
        "import tfdist": imports["tfdist"],
        "tfdist run -np 1": [a - b for a, b in zip(programs["run"], programs["python"], strict=True)],
    }
    print(f"\n{added_table(added, _LIMITS)}")
    print(
        f"\nFor scale, medians: import keras {statistics.median(imports['keras']):.2f} s; the first name of "
        f"tfdist that needs Keras {statistics.median(imports['first name']):.2f} s; an empty program by "
        f"python {statistics.median(programs['python']):.3f} s, by tfdist run -np 1 "
        f"{statistics.median(programs['run']):.3f} s."
    )
    settings = {"rounds": options.rounds, "programs": options.programs}
    report.finish(options.json, settings=settings, figures={"imports": imports, "programs": programs})
    return 0


def added_table(added: Mapping[str, Sequence[float]], limits: Mapping[str, float]) -> str:
    """What each adds, in milliseconds, beside its target."""
    rows = []
    for what, seconds in added.items():
        median = statistics.median(seconds)
        verdict = "met" if median <= limits[what] else "missed"
        rows.append(
            [
                what,
                f"{1e3 * median:.1f}",
                f"{1e3 * min(seconds):.1f}",
                f"{1e3 * max(seconds):.1f}",
                f"<= {1e3 * limits[what]:.0f}",
                verdict,
            ]
        )
    return table(["ms added by", "median", "least", "most", "target", ""], rows)


def _time_imports(options: argparse.Namespace) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {"keras": [], "tfdist": [], "first name": []}
    for _ in range(options.rounds):
        output = _run([sys.executable, "-c", _IMPORTS], timeout=options.timeout)
        line = next(line for line in output.splitlines() if line.startswith("TFDIST_START "))
        for name, text in zip(times, line.split()[1:], strict=True):
            times[name].append(float(text))
    return times


def _time_programs(options: argparse.Namespace) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {"python": [], "run": []}
    with tempfile.TemporaryDirectory(prefix="tfdist-bench-") as folder:
        program = pathlib.Path(folder) / "program.py"
        program.write_text(_PROGRAM)
        commands = {
            "python": [sys.executable, str(program)],
            "run": [sys.executable, "-m", "tfdist", "run", "-np", "1", str(program)],
        }
        for _ in range(options.programs):
            for name, command in commands.items():
                begin = time.perf_counter()
                _run(command, timeout=options.timeout)
                times[name].append(time.perf_counter() - begin)
    return times


def _run(command: Sequence[str], *, timeout: float) -> str:
    own = str(pathlib.Path(tfdist.__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, [own, os.environ.get("PYTHONPATH")]))
    try:
        result = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "3"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
        )
    except subprocess.TimeoutExpired as error:
        raise TfdistError(f"{' '.join(command[:4])} did not end within {timeout:g} s (--timeout).") from error
    if result.returncode:
        lines = "\n".join(result.stderr.splitlines()[-10:])
        raise TfdistError(f"{' '.join(command[:4])} ended with code {result.returncode}:\n{lines}")
    return result.stdout


def _parser() -> argparse.ArgumentParser:
    parser = report.parser("start", "What `import tfdist` and `tfdist run -np 1` add.")
    add = parser.add_argument
    add("--rounds", type=report.at_least(1), default=5, metavar="R", help="imports of Keras and tfdist (5)")
    add("--programs", type=report.at_least(1), default=15, metavar="R", help="programs of each kind (15)")
    return parser
