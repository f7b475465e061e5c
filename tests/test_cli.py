"""The command line: what is understood, what is refused, and what is never imported."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

import tfdist
from tfdist import cli
from tfdist.launch import run

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def outside_any_world(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("TFDIST_", "HOROVOD_", "OMPI_", "PMI_", "SLURM_", "TF_CONFIG")):
            monkeypatch.delenv(name)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"tfdist {tfdist.__version__}\n"


@pytest.mark.parametrize(("argv", "code"), [(["--help"], 0), ([], 2)])
def test_help_lists_the_commands(argv: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == code
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out for name in ("run", "doctor", "build-horovod", "bench"))


def test_unknown_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trian"]) == 2
    assert "'trian'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "Which script?"),
        (["-np", "2"], "Which script?"),
        (["-np", "2", "-m"], "Which module?"),
        (["train.py"], "There is no script 'train.py'"),
        (["-np", "2", "no-such-program"], "no script or program 'no-such-program'"),
        (["{script}"], "Give -np N"),
        (["-np", "0", "{script}"], "at least 1. Received 0"),
        (["-np", "-1", "{script}"], "at least 1. Received -1"),
        (["-np", "two", "{script}"], "invalid int value: 'two'"),
        (["-np", "2", "--backend", "nccl", "{script}"], "'nccl'"),
        (["-np", "2", "--timeout", "0", "{script}"], "'0'"),
        (["-np", "2", "--timeout", "nan", "{script}"], "'nan'"),
        (["-np", "2", "--bakcend", "tf", "{script}"], "--bakcend"),
        (["-np", "2", "-H", "localhost:0", "{script}"], "'localhost:0'"),
        (["-np", "3", "-H", "localhost:2", "{script}"], "2 slots"),
        (["-np", "2", "{text}"], "neither a .py file nor executable"),
        (["-np", "1", "--output-dir", "{text}/logs", "{script}"], "--output-dir"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    argv: list[str],
    message: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ok.py").write_text("")
    (tmp_path / "notes.txt").write_text("")
    names = {"script": "ok.py", "text": "notes.txt"}
    try:
        code = cli.main(["run", *(word.format(**names) for word in argv)])
    except SystemExit as end:  # argparse
        code = int(end.code or 0)
    out, err = capfd.readouterr()
    assert (code, out) == (2, "")
    assert err.startswith("tfdist run: error: ")
    assert message in err
    assert err.count("\n") == 1


def test_a_world_inside_a_world_is_refused(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "ok.py"
    script.write_text("")
    for name, value in {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    monkeypatch.setenv("PMIX_NAMESPACE", "x")
    assert cli.main(["run", "-np", "2", str(script)]) == 2
    assert "already is rank 1 of 2, started by openmpi" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "head", "program"),
    [
        (["-np", "2", "a.py", "-np", "3"], ["-np", "2"], ["a.py", "-np", "3"]),
        (["--backend=tf", "--verbose", "a.py"], ["--backend=tf", "--verbose"], ["a.py"]),
        (["-np", "2", "-m", "mod", "--verbose"], ["-np", "2", "-m"], ["mod", "--verbose"]),
        (["-np", "2", "--", "-odd.py", "x"], ["-np", "2"], ["-odd.py", "x"]),
        (["-np"], ["-np"], []),
    ],
)
def test_options_end_where_the_program_begins(argv: list[str], head: list[str], program: list[str]) -> None:
    assert run.split_program(argv) == (head, program)


def test_dry_run_starts_nothing_and_shows_every_rank(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "ok.py"
    script.write_text("raise SystemExit(5)")
    assert cli.main(["run", "-H", "localhost:2", "--dry-run", str(script), "--epochs", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[:8] for line in lines] == ["rank 0: ", "rank 1: "]
    assert all(line.endswith(f"{sys.executable} {script} --epochs 3") for line in lines)


def test_dry_run_with_other_hosts_shows_the_other_launcher(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, horovodrun = tmp_path / "ok.py", tmp_path / "horovodrun"
    script.write_text("")
    horovodrun.write_text("#!/bin/sh\n")
    horovodrun.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert cli.main(["run", "-H", "a.example:2,b.example:2", "--dry-run", str(script)]) == 0
    assert f"{horovodrun} --gloo -np 4 -H a.example:2,b.example:2" in capsys.readouterr().out


def test_other_hosts_are_handed_over_with_the_environment(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    horovodrun = folder / "horovodrun"
    horovodrun.write_text('#!/bin/sh\necho "$TFDIST_STRATEGY $*"\nexit 6\n')
    horovodrun.chmod(0o755)
    (folder / "python").symlink_to(sys.executable)  # whose folder is looked into first
    code = (
        f"import sys; sys.executable = {str(folder / 'python')!r}; from tfdist.cli import main; "
        "sys.exit(main(['run', '-H', 'a.example:1,b.example:1', '--strategy', 'ring', '-m', 'this']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    command = f"--gloo -np 2 -H a.example:1,b.example:1 {folder}/python -m this"
    assert (done.returncode, done.stdout) == (6, f"ring {command}\n")
    assert done.stderr == f"tfdist run: {horovodrun} {command}\n"


def test_tensorflow_and_keras_are_not_imported_by_the_launcher(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "ok.py"
    script.write_text("print('ran')")
    code = (
        "import sys; from tfdist.cli import main; code = main(['run', '-np', '2', sys.argv[1]]); "
        "print(sorted({'tensorflow', 'keras', 'numpy', 'cloudpickle'} & set(sys.modules)), code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(script)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.splitlines()[-1] == "[] 0"
    assert done.stdout.count("ran") == 2
