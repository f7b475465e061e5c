"""The doctor's command: what it prints, its exit codes, and one examination of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

from tests.source_tree import search_path
from tfdist.doctor import command, trials
from tfdist.doctor.facts import Facts
from tfdist.doctor.trials import Trial, read_answers, try_backend


def _examine(
    monkeypatch: pytest.MonkeyPatch, facts: Facts, outcomes: list[Trial], *words: str
) -> tuple[int, list[str]]:
    """Runs the command on given facts; returns its exit code and which trials it asked for."""
    asked: list[str] = []

    def run_trials(facts: Facts, environ: object, *, timeout: float) -> list[Trial]:
        asked.extend(trial.backend for trial in outcomes)
        return outcomes

    monkeypatch.setattr(command, "gather_facts", lambda environ, timeout: facts)
    monkeypatch.setattr(command, "run_trials", run_trials)
    return command.main(list(words)), asked


def test_healthy_machine_exits_0(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = _examine(monkeypatch, Facts(), [Trial("tf", 0.02, 8.4e8, "CPU")])
    output = capsys.readouterr().out
    assert code == 0
    assert "16 MiB in 20 ms, 0.84 GB/s (CPU)" in output
    assert "Findings\n  none" in output


def test_missing_horovod_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _ = _examine(monkeypatch, Facts(horovod=None), [Trial("tf", 0.02, 8.4e8, "CPU")])
    assert code == 0
    assert "tfdist build-horovod" in capsys.readouterr().out


def test_error_exits_1_with_its_fix(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = Trial("tf", error="rank 1 did not start", output="line one\nline two")
    code, _ = _examine(monkeypatch, Facts(), [failed], "--verbose")
    output = capsys.readouterr().out
    assert code == 1
    assert "failed: rank 1 did not start" in output
    assert "    | line two" in output
    assert "    fix: " in output


def test_json_holds_everything(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = _examine(monkeypatch, Facts(legacy_keras=True), [Trial("tf", 0.02, 8.4e8, "CPU")], "--json")
    report = json.loads(capsys.readouterr().out)
    assert code == 1
    assert report["can_train"] is False
    assert report["facts"]["tensorflow_version"] == "2.21.0"
    assert report["trials"][0]["backend"] == "tf"
    assert report["findings"][0]["severity"] == "error"


@pytest.mark.parametrize(("facts", "words"), [(Facts(), ["--quick"]), (Facts(launcher_size=4), [])])
def test_no_world_inside_a_world_and_none_when_quick(
    monkeypatch: pytest.MonkeyPatch, facts: Facts, words: list[str]
) -> None:
    _, asked = _examine(monkeypatch, facts, [Trial("tf")], *words)
    assert asked == []


def test_malformed_timeout_is_a_usage_error() -> None:
    with pytest.raises(SystemExit) as caught:
        command.main(["--timeout", "0"])
    assert caught.value.code == 2


def _answers(**changes: object) -> str:
    answer = {"engine": "tf", "right": True, "seconds": 0.02, "device": "CPU"}
    return "chatter\nTFDIST_TRIAL " + json.dumps([answer, {**answer, **changes}])


def test_answers_are_judged() -> None:
    good = read_answers("tf", _answers(seconds=0.04), "", code=0)
    assert good.error == ""
    assert good.bandwidth == pytest.approx(16 * 2**20 / 0.04)  # the slower rank's time
    assert "ran on" in read_answers("horovod", _answers(), "", code=0).error
    assert "on rank 1" in read_answers("tf", _answers(right=False), "", code=0).error
    errors = "Traceback\n  File x\ntfdist.errors.PeerLostError: rank 1 ended\nlast words of a library\n"
    assert read_answers("tf", "", errors, code=1).error == "tfdist.errors.PeerLostError: rank 1 ended"
    assert "exit code 7" in read_answers("tf", "", "", code=7).error


def test_trial_that_hangs_is_ended_within_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "_PROGRAM", "import time; time.sleep(300)")
    start = time.monotonic()
    assert "no result within 2 s" in try_backend("tf", os.environ, timeout=2).error
    assert time.monotonic() - start < 60


def test_doctor_examines_this_machine() -> None:
    """End to end: real facts, and a real two-process all-reduce on every backend that is here."""
    # As inside an interrupted job: what it left must reach neither verdict nor trial.
    environment = {**os.environ, "PYTHONPATH": search_path(), "TFDIST_TIMEOUT": "60"}
    result = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from tfdist.doctor import main; sys.exit(main(['--json', '--timeout', '240']))",
        ],
        capture_output=True,
        text=True,
        timeout=1200,
        env=environment,
    )
    report = json.loads(result.stdout)
    outcomes = {trial["backend"]: trial for trial in report["trials"]}
    assert outcomes["tf"]["error"] == ""
    assert outcomes["tf"]["bandwidth"] > 0
    horovod = report["facts"]["horovod"]
    if horovod is not None and not horovod["problem"]:
        assert outcomes["horovod"]["error"] == ""
    assert report["facts"]["gpus"] == [] or report["facts"]["tensorflow_cuda"]
    assert report["can_train"] is True
    assert result.returncode == 0
