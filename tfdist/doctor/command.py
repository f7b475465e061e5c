"""`tfdist doctor`: prints facts, trials, findings; the exit code says whether training can work."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence

from tfdist.doctor.facts import Facts, gather_facts
from tfdist.doctor.findings import Finding, can_train, find_problems
from tfdist.doctor.trials import Trial, run_trials


def describe_facts(facts: Facts) -> str:
    """The facts as aligned lines for people."""
    tensorflow = facts.tensorflow_version or "unusable"
    distributions = ", ".join(f"{name} {version}" for name, version in facts.tensorflow_distributions)
    build = "CUDA" if facts.tensorflow_cuda else "CPU"
    memory = f"{facts.memory / 1e9:.1f} GB" if facts.memory else "unknown"
    shared = "none" if facts.shared_memory is None else f"{facts.shared_memory / 1e9:.1f} GB"
    address = facts.host_address or "does not resolve"
    rows = [
        ("tfdist", facts.tfdist),
        ("Python", f"{facts.python} ({facts.executable})"),
        ("system", facts.system),
        ("resources", f"{facts.cores} cores, {memory} of memory free, /dev/shm {shared}"),
        ("TensorFlow", f"{tensorflow} ({build} build; installed: {distributions or 'none'})"),
        ("Keras", f"{facts.keras_version or 'unusable'} on {facts.keras_backend or 'nothing'}"),
        ("GPUs", ", ".join(facts.gpus) or f"none for TensorFlow, {facts.nvidia_devices} in the system"),
        ("Horovod", _describe_horovod(facts)),
        ("MPI", f"{facts.mpirun_version} ({facts.mpirun})" if facts.mpirun else "no mpirun"),
        ("launcher", " ".join(filter(None, [facts.launcher, facts.launcher_place]))),
        ("host", f"{facts.host}, {address}"),
    ]
    return "\n".join(f"  {name:<11}{text}" for name, text in rows)


def _describe_horovod(facts: Facts) -> str:
    horovod = facts.horovod
    if horovod is None:
        return "not installed"
    text = f"{horovod.version} with {', '.join(horovod.features) or 'nothing'}"
    if horovod.built_for:
        text += f", for TensorFlow {horovod.built_for}"
    return f"{text}; unusable" if horovod.problem else text


def describe_trial(trial: Trial) -> str:
    """One trial as a line."""
    if trial.error:
        return f"  {trial.backend:<13}failed: {trial.error}"
    return (
        f"  {trial.backend:<13}16 MiB in {trial.seconds * 1e3:.0f} ms, {trial.bandwidth / 1e9:.2f} GB/s "
        f"({trial.device})"
    )


def describe_findings(findings: Sequence[Finding]) -> str:
    """Each finding with its fix below it."""
    if not findings:
        return "  none"
    return "\n".join(
        f"  {finding.severity.value}: {finding.what}\n    fix: {finding.fix}" for finding in findings
    )


def to_json(facts: Facts, trials: Sequence[Trial], findings: Sequence[Finding]) -> str:
    """Everything as JSON, for bug reports and programs."""
    return json.dumps(
        {
            "facts": dataclasses.asdict(facts),
            "trials": [dataclasses.asdict(trial) for trial in trials],
            "findings": [
                {"severity": finding.severity.value, "what": finding.what, "fix": finding.fix}
                for finding in findings
            ],
            "can_train": can_train(findings),
        },
        indent=2,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tfdist doctor",
        description="Checks whether training works here: versions, devices, launcher, a two-process "
        "all-reduce on each backend; names each problem with its fix. Exit code 0 if training can work.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, to attach to a bug report")
    parser.add_argument("--quick", action="store_true", help="look only, start no processes to all-reduce")
    parser.add_argument(
        "--verbose", action="store_true", help="show what the processes of a failed trial said"
    )
    parser.add_argument("--timeout", type=_positive, default=90.0, metavar="S", help="bound for each step")
    return parser


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"needs a positive number of seconds, received {text}")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of `tfdist doctor`.

    Args:
        argv: words after `tfdist doctor`; default: this process's.

    Returns:
        0 if nothing found keeps models from training, else 1.
    """
    options = _parser().parse_args(argv)
    facts = gather_facts(os.environ, timeout=options.timeout)
    inside_world = facts.launcher_size > 1
    trials: list[Trial] = []
    if not options.json:
        print(f"tfdist doctor\n{describe_facts(facts)}\n", flush=True)
    if not options.quick and not inside_world:
        if not options.json:
            print("All-reduce between 2 processes", flush=True)
        trials = run_trials(facts, os.environ, timeout=options.timeout)
    findings = find_problems(facts, trials)
    if options.json:
        print(to_json(facts, trials, findings))
        return 0 if can_train(findings) else 1
    for trial in trials:
        print(describe_trial(trial))
        if options.verbose and trial.output:
            print("\n".join(f"    | {line}" for line in trial.output.splitlines()))
    if inside_world:
        print("All-reduce not tried: this process is one rank of a world; run the doctor without launcher.")
    elif options.quick:
        print("All-reduce not tried (--quick).")
    elif not trials:
        print("  not tried: TensorFlow or Keras is unusable")
    print(f"\nFindings\n{describe_findings(findings)}")
    verdict = (
        "Training can work here." if can_train(findings) else "Training can't work here yet: see the errors."
    )
    print(f"\n{verdict}", flush=True)
    return 0 if can_train(findings) else 1


if __name__ == "__main__":
    sys.exit(main())
