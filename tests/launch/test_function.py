"""`tfdist.run` with a stand-in for `tfdist.init()`, so that a world costs 50 ms instead of 5 s.

The real one is exercised in tests/distributed/.
"""

from __future__ import annotations

import os
import pathlib
import signal
import sys
import threading
import time

import pytest

from tfdist.errors import LauncherError, PeerLostError
from tfdist.launch import function

STAND_IN = """
import os
calls = []
def init(): calls.append("init")
def shutdown(): calls.append("shutdown")
def rank(): return int(os.environ["TFDIST_RANK"])
"""


@pytest.fixture(autouse=True)
def stand_in(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """What the ranks import as tfdist; this process keeps the real one."""
    package = tmp_path / "lib" / "tfdist"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(STAND_IN)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "lib"), *sys.path])
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    for name in list(os.environ):
        if name.startswith(("TFDIST_", "HOROVOD_", "OMPI_", "PMI_", "SLURM_", "TF_CONFIG")):
            monkeypatch.delenv(name)
    return tmp_path


def test_results_come_in_rank_order() -> None:
    offset = 100

    def call(a: int, b: int, *, c: int) -> tuple[int, int]:
        import os

        return offset + a * b + c, int(os.environ["TFDIST_RANK"])

    assert function.run(call, (2, 3), {"c": 4}, 3) == [(110, 0), (110, 1), (110, 2)]


def test_init_comes_before_and_shutdown_after() -> None:
    def call() -> list[str]:
        import tfdist

        return tfdist.calls  # type: ignore[attr-defined, no-any-return]  # the list itself: sent after shutdown

    assert function.run(call, np=1) == [["init", "shutdown"]]


def test_options_reach_init_through_the_environment() -> None:
    def call() -> list[str | None]:
        import os

        return [os.environ.get(f"TFDIST_{name}") for name in ("BACKEND", "STRATEGY", "TIMEOUT", "SIZE")]

    (result,) = function.run(call, np=1, backend="tf", strategy="mirrored", timeout=7)
    assert result == ["tf", "mirrored", "7", "1"]


def test_output_of_ranks_appears_in_sys_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    function.run(lambda: print("hallå"), np=2)
    assert sorted(capsys.readouterr().out.splitlines()) == ["[0] hallå", "[1] hallå"]


def test_exception_of_a_rank_is_raised_here_with_its_traceback() -> None:
    def call() -> None:
        import os
        import time

        def innermost() -> None:
            raise FileNotFoundError(2, "no such data", "digits.csv")

        if os.environ["TFDIST_RANK"] == "1":
            innermost()
        time.sleep(60)

    with pytest.raises(FileNotFoundError, match=r"digits\.csv") as error:
        function.run(call, np=2)
    assert isinstance(error.value.__cause__, function.RemoteTraceback)
    assert error.value.__cause__.rank == 1
    assert "in innermost" in str(error.value.__cause__)


def test_exception_that_cannot_travel_keeps_its_name_and_text() -> None:
    def call() -> None:
        class OddError(Exception):
            def __init__(self, first: int, second: int) -> None:
                super().__init__(f"{first} and {second}")

        raise OddError(1, 2)

    with pytest.raises(RuntimeError, match="OddError: 1 and 2"):
        function.run(call, np=1)


def test_leaving_the_interpreter_is_an_error_too() -> None:
    with pytest.raises(RuntimeError, match="SystemExit: 3"):
        function.run(lambda: __import__("sys").exit(3), np=1)


@pytest.mark.parametrize(
    ("source", "how"), [("os._exit(0)", "exit code 0"), ("os.kill(os.getpid(), 9)", "signal 9")]
)
def test_rank_that_ends_without_an_answer_is_named(source: str, how: str) -> None:
    with pytest.raises(PeerLostError, match=f"rank 0 ended (with|by) {how}"):
        function.run(lambda: exec(f"import os; {source}"), np=1)


def test_result_that_cannot_be_sent_says_so() -> None:
    with pytest.raises(TypeError, match=r"received [Ll]ock"):
        function.run(lambda: __import__("threading").Lock(), np=1)


def test_bad_arguments_start_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LauncherError, match="'nccl'"):
        function.run(os.getpid, backend="nccl")
    with pytest.raises(LauncherError, match="Received 0"):
        function.run(os.getpid, np=0)
    for name, value in {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "JOB": "j"}.items():
        monkeypatch.setenv(f"TFDIST_{name}", value)
    with pytest.raises(LauncherError, match="rank 1 of 2"):
        function.run(os.getpid)


def test_interrupting_the_call_ends_the_ranks(stand_in: pathlib.Path) -> None:
    def call(folder: str) -> None:
        import os
        import pathlib
        import time

        (pathlib.Path(folder) / f"pid-{os.environ['TFDIST_RANK']}").write_text(str(os.getpid()))
        time.sleep(120)

    def pids() -> list[int]:
        return [int(text) for file in stand_in.glob("pid-*") if (text := file.read_text())]

    def interrupt() -> None:
        deadline = time.monotonic() + 30
        while len(pids()) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        function.run(call, (str(stand_in),), np=2)
    thread.join()
    assert len(pids()) == 2
    assert not [pid for pid in pids() if pathlib.Path(f"/proc/{pid}").exists()]
    assert not list(stand_in.glob("tfdist-run-*"))


def test_descriptors_and_threads_do_not_leak() -> None:
    def count() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    function.run(lambda: 1, np=1)
    before = count()
    for _ in range(3):
        function.run(lambda: 1, np=2)
    assert count() == before
