"""A real all-reduce between two processes on each backend, with its bandwidth.

Each trial runs in processes of its own and has a bound, so that a backend that hangs or crashes costs the
doctor a line in its report and not its life.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tfdist
from tfdist.doctor.facts import Facts
from tfdist.errors import BackendUnavailableError
from tfdist.launch import horovod_proof

_MEGABYTES = 16

_PROGRAM = """
import json, sys, tfdist

def reduce(megabytes):
    import time
    import tensorflow as tf
    import tfdist
    value = tf.fill([megabytes * 262144], float(tfdist.rank() + 1))
    seconds, total = [], None
    for step in range(5):
        start = time.perf_counter()
        total = tfdist.allreduce(value, op=tfdist.Sum, name="doctor")
        total.numpy()
        seconds.append(time.perf_counter() - start)
    return {
        "engine": tfdist.backend(),
        "right": bool(tf.reduce_all(total == 3.0)),
        "seconds": min(seconds),
        "device": "GPU" if "GPU" in total.device else "CPU",
    }

answers = tfdist.run(reduce, (int(sys.argv[2]),), np=2, backend=sys.argv[1], timeout=float(sys.argv[3]))
print("\\nTFDIST_TRIAL " + json.dumps(answers), flush=True)
"""

# What an outer launcher set would make the trial's processes join its job.
_LAUNCHER_VARIABLES = re.compile(r"(TFDIST|HOROVOD|OMPI|PMI|PMIX|PRTE|SLURM)_?\w*|PMI_?\w*|TF_CONFIG")


@dataclasses.dataclass(frozen=True)
class Trial:
    """Outcome of one two-process all-reduce.

    Attributes:
        backend: `tf`, `horovod`, or `horovod+mpi` (Horovod started by mpirun).
        seconds: best time of one all-reduce; 0 if it failed.
        bandwidth: bus bandwidth in bytes a second: 2(N-1)/N of the tensor's bytes over `seconds`.
        device: `CPU` or `GPU`, where the tensors were.
        error: why it failed; empty if it worked.
        output: what the processes said; only of a failure.
    """

    backend: str
    seconds: float = 0.0
    bandwidth: float = 0.0
    device: str = ""
    error: str = ""
    output: str = ""


def run_trials(facts: Facts, environ: Mapping[str, str], *, timeout: float) -> list[Trial]:
    """Tries every backend that is here.

    Args:
        facts: tells which backends are here.
        environ: environment variables; those of an outer launcher are left out.
        timeout: bound in seconds for each trial.
    """
    if facts.tensorflow_error or facts.keras_error or facts.missing_packages:
        return []
    trials = [try_backend("tf", environ, timeout=timeout)]
    horovod = facts.horovod
    if horovod is not None and not horovod.problem:
        trials.append(try_backend("horovod", environ, timeout=timeout))
        if facts.mpirun and "mpi" in horovod.features:
            trials.append(_try_mpi(facts.mpirun, timeout=timeout))
    return trials


def try_backend(backend: str, environ: Mapping[str, str], *, timeout: float) -> Trial:
    """All-reduces between two processes that `tfdist.run` starts.

    Args:
        backend: `tf` or `horovod`.
        environ: environment variables.
        timeout: bound in seconds.
    """
    environment = {k: v for k, v in environ.items() if not _LAUNCHER_VARIABLES.fullmatch(k)}
    # The processes must find this tfdist, wherever it was imported from.
    own = str(Path(tfdist.__file__).resolve().parent.parent)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [own, environment.get("PYTHONPATH")]))
    inner = max(1.0, timeout * 0.8)  # so that tfdist's own error, which names the rank, comes first
    command = [sys.executable, "-c", _PROGRAM, backend, str(_MEGABYTES), str(inner)]
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        return Trial(backend, error=f"no result within {timeout:g} s")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return read_answers(backend, output, errors, code=process.returncode)


def read_answers(backend: str, output: str, errors: str, *, code: int) -> Trial:
    """Judges what a trial's processes printed."""
    said = (output + "\n" + errors).strip()
    line = next((line for line in output.splitlines() if line.startswith("TFDIST_TRIAL ")), None)
    if line is None:
        lines = [text.strip() for text in errors.splitlines() if text.strip()]
        named = [text for text in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", text)]
        last = (named or lines or [f"exit code {code} without a message"])[-1]
        return Trial(backend, error=last[:500], output=said)
    answers: list[dict[str, Any]] = json.loads(line.removeprefix("TFDIST_TRIAL "))
    engines = {answer["engine"] for answer in answers}
    if engines != {backend}:
        return Trial(backend, error=f"ran on {', '.join(sorted(engines))} instead", output=said)
    wrong = [rank for rank, answer in enumerate(answers) if not answer["right"]]
    if wrong:
        ranks = ", ".join(map(str, wrong))
        return Trial(backend, error=f"the sum of 1 and 2 was not 3 on rank {ranks}", output=said)
    seconds = max(answer["seconds"] for answer in answers)
    return Trial(backend, seconds, _MEGABYTES * 2**20 / seconds, answers[0]["device"])


def _try_mpi(mpirun: str, *, timeout: float) -> Trial:
    """All-reduces under the mpirun that a user would get; if that fails, looks for one that works."""
    try:
        proof = horovod_proof.prove_mpi(mpirun, megabytes=_MEGABYTES, timeout=timeout)
    except BackendUnavailableError as error:
        text = str(error)
        reason = text.splitlines()[0]
        beside = Path(sys.executable).parent / "mpirun"
        if beside.exists() and str(beside) != mpirun:
            with contextlib.suppress(BackendUnavailableError):
                horovod_proof.prove_mpi(str(beside), megabytes=_MEGABYTES, timeout=timeout)
                reason = f"{mpirun} belongs to another MPI than Horovod was built with; {beside} works"
        return Trial("horovod+mpi", error=reason, output=text)
    return Trial("horovod+mpi", proof.seconds, proof.bandwidth, proof.device)
