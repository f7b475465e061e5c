"""Real processes, without TensorFlow: what starts, what is shown, and above all that everything ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import pty
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator

import pytest

pytestmark = pytest.mark.alone

ROOT = pathlib.Path(__file__).parents[2]
BOUND = 30  # seconds; a hang fails the test instead of the suite

# Every rank starts a child that ignores SIGTERM, and one that has left its process group.
FAMILY = """
import os, subprocess, sys, time
rank = int(os.environ["TFDIST_RANK"])
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(120)"
child = subprocess.Popen([sys.executable, "-c", stubborn])
stray = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"], start_new_session=True)
print("pids", os.getpid(), child.pid, stray.pid, flush=True)
"""


class Launcher:
    """Writes scripts and runs `tfdist run` on them."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        private = folder / "private"
        private.mkdir()
        self.private = private
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("TFDIST_", "HOROVOD_"))}
        self.environ = inherited | {"PYTHONPATH": str(ROOT), "TMPDIR": str(private)}

    def command(self, source: str, *options: str, args: tuple[str, ...] = ()) -> list[str]:
        script = self.folder / "script.py"
        script.write_text(source)
        return [sys.executable, "-m", "tfdist", "run", *options, str(script), *args]

    def run(self, source: str, *options: str, args: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        command = self.command(source, *options, args=args)
        return subprocess.run(
            command, env=self.environ, capture_output=True, text=True, timeout=BOUND, stdin=subprocess.DEVNULL
        )

    @contextlib.contextmanager
    def started(self, source: str, *options: str) -> Iterator[subprocess.Popen[str]]:
        process = subprocess.Popen(
            self.command(source, *options),
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()
            if process.stdout and not process.stdout.closed:
                process.stdout.close()


@pytest.fixture
def launcher(tmp_path: pathlib.Path) -> Launcher:
    return Launcher(tmp_path)


def is_running(process: int) -> bool:
    try:
        state = pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def read_pids(process: subprocess.Popen[str], ranks: int) -> list[int]:
    """Process ids that `FAMILY` scripts print, once every rank did."""
    assert process.stdout is not None
    pids: list[int] = []
    for line in process.stdout:
        if "pids" in line:
            pids += [int(word) for word in line.split("pids")[1].split()]
        if len(pids) == 3 * ranks:
            return pids
    raise AssertionError("the launcher ended before its ranks had started")


def assert_nothing_left(launcher: Launcher, pids: list[int]) -> None:
    assert wait_until(lambda: not any(map(is_running, pids))), [p for p in pids if is_running(p)]
    assert wait_until(lambda: not list(launcher.private.iterdir())), list(launcher.private.iterdir())


# What is started and shown


def test_ranks_get_their_place_arguments_and_prefix(launcher: Launcher) -> None:
    source = """
import os, stat, sys
from tfdist.cluster import from_environment
spec = from_environment(os.environ)
folder = os.path.dirname(spec.rendezvous.removeprefix("file://"))
print(spec.rank, spec.size, spec.launcher, oct(stat.S_IMODE(os.stat(folder).st_mode)), sys.argv[1:])
print("to stderr", file=sys.stderr)
print(spec.job, os.environ["TFDIST_SECRET"])
"""
    done = launcher.run(source, "-np", "3", args=("--np", "7", "x y"))
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    for rank in range(3):
        assert f"[{rank}] {rank} 3 tfdist 0o700 ['--np', '7', 'x y']" in lines
    assert sorted(done.stderr.splitlines()) == [f"[{rank}] to stderr" for rank in range(3)]
    identities = {line[4:] for line in lines if " run-" in line}
    assert len(identities) == 1
    assert not list(launcher.private.iterdir())


def test_two_runs_have_different_jobs_and_secrets(launcher: Launcher) -> None:
    source = "import os; print(os.environ['TFDIST_JOB']); print(os.environ['TFDIST_SECRET'])"
    first, second = (launcher.run(source, "-np", "1").stdout.split() for _ in range(2))
    assert len(first) == 2
    assert not set(first) & set(second)


def test_one_rank_looks_like_plain_python(launcher: Launcher) -> None:
    source = "import sys; print('out', end=''); print('err', file=sys.stderr); sys.exit(4)"
    done = launcher.run(source, "-np", "1")
    assert (done.stdout, done.stderr, done.returncode) == ("out", "err\n", 4)


def test_only_rank_0_reads_standard_input(launcher: Launcher) -> None:
    command = launcher.command("import sys; print(sys.stdin.read().strip() or 'nothing')", "-np", "2")
    done = subprocess.run(
        command, env=launcher.environ, input="hello", capture_output=True, text=True, timeout=BOUND
    )
    assert sorted(done.stdout.splitlines()) == ["[0] hello", "[1] nothing"]


def test_modules_and_executables_run(launcher: Launcher) -> None:
    (launcher.folder / "mod.py").write_text("import sys; print('module', *sys.argv[1:])")
    shell = launcher.folder / "job.sh"
    shell.write_text("#!/bin/sh\necho shell $TFDIST_RANK $1\n")
    shell.chmod(0o755)
    base = [sys.executable, "-m", "tfdist", "run", "-np", "1"]
    environ = launcher.environ | {"PYTHONPATH": f"{ROOT}:{launcher.folder}"}
    for words, expected in ((["-m", "mod", "-m", "a"], "module -m a\n"), ([str(shell), "b"], "shell 0 b\n")):
        done = subprocess.run([*base, *words], env=environ, capture_output=True, text=True, timeout=BOUND)
        assert (done.stdout, done.stderr) == (expected, "")


def test_output_dir_has_one_file_per_rank(launcher: Launcher) -> None:
    source = "import os, sys; print('r' + os.environ['TFDIST_RANK']); print('\\rbar', file=sys.stderr)"
    folder = launcher.folder / "a" / "logs"
    done = launcher.run(source, "-np", "2", "--output-dir", str(folder))
    assert done.returncode == 0
    assert done.stdout == ""
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == {
        f"rank-{rank}.log": f"r{rank}\n\rbar\n".encode() for rank in range(2)
    }


def test_start_up_noise_is_hidden_unless_verbose(launcher: Launcher) -> None:
    noise = "I0000 00:00:1795983609.536603    9855 port.cc:153] oneDNN custom operations are on."
    source = (
        f"import os, sys; print({noise!r}, file=sys.stderr); print(os.environ.get('TF_CPP_MIN_LOG_LEVEL'))"
    )
    quiet, loud = (launcher.run(source, "-np", "2", *more) for more in ((), ("--verbose",)))
    assert quiet.stderr == ""
    assert sorted(quiet.stdout.splitlines()) == ["[0] 2", "[1] 2"]
    assert sorted(loud.stderr.splitlines()) == [f"[0] {noise}", f"[1] {noise}"]


def run_in_terminal(
    launcher: Launcher, command: list[str], *, interrupt_at: int | None = None
) -> tuple[int, bytes]:
    """Runs a command in a terminal; types Ctrl-C once `ready` has appeared `interrupt_at` times."""
    process, terminal = pty.fork()
    if process == 0:
        os.execve(command[0], command, launcher.environ)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 77, 0, 0))
    shown = b""
    deadline = time.monotonic() + BOUND
    try:
        while time.monotonic() < deadline:
            if select.select([terminal], [], [], 0.1)[0]:
                try:
                    data = os.read(terminal, 4096)
                except OSError:
                    break
                if not data:
                    break
                shown += data
            if interrupt_at and shown.count(b"ready") >= interrupt_at:
                interrupt_at = None
                os.write(terminal, b"\x03")
        else:
            os.kill(process, signal.SIGKILL)
    finally:
        os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), shown


def test_progress_bar_on_a_terminal(launcher: Launcher) -> None:
    source = """
import os, sys, time
rank = int(os.environ["TFDIST_RANK"])
if rank == 0:
    print(sys.stdout.isatty(), os.get_terminal_size().columns)
    for step in range(3):
        sys.stdout.write("\\b" * 5 * bool(step) + f"\\r{step} ---")
        sys.stdout.flush()
        time.sleep(0.05)
    print()
else:
    print(sys.stdout.isatty())
"""
    code, shown = run_in_terminal(launcher, launcher.command(source, "-np", "2"))
    assert code == 0
    assert b"[0] True 77\r\n" in shown
    assert b"[1] False\r\n" in shown
    assert b"\b\b\b\b\b\r2 ---\r\n" in shown


# Failure


def test_first_failing_rank_has_the_last_word_and_its_exit_code(launcher: Launcher) -> None:
    source = """
import os, signal, sys, time
if os.environ["TFDIST_RANK"] == "1":
    time.sleep(0.3)
    def fail(): raise ValueError("boom")
    sys.excepthook = lambda *a: (sys.__excepthook__(*a), sys.stderr.flush(), os._exit(7))
    fail()
def complain(*_):
    print("Traceback (most recent call last):\\nRuntimeError: consequence", file=sys.stderr)
    os._exit(9)
signal.signal(signal.SIGTERM, complain)
time.sleep(60)
"""
    done = launcher.run(source, "-np", "3")
    assert done.returncode == 7
    lines = done.stderr.splitlines()
    assert lines[-1] == "[1] ValueError: boom"
    start = max(index for index, line in enumerate(lines) if line.startswith("tfdist run:"))
    assert "rank 1 failed first, with exit code 7" in lines[start]
    assert lines[start + 1] == "[1] Traceback (most recent call last):"
    assert "[2] RuntimeError: consequence" in lines[:start]


def test_peer_that_ends_sooner_does_not_hide_the_cause(launcher: Launcher) -> None:
    # Rank 1 fails, and needs a while to end; rank 0 notices and is gone before it.
    source = """
import atexit, os, sys, time
if os.environ["TFDIST_RANK"] == "1":
    atexit.register(time.sleep, 0.7)
    time.sleep(0.3)
    raise ValueError("cause")
time.sleep(0.6)
class HorovodInternalError(Exception): pass
raise HorovodInternalError("shut down")
"""
    done = launcher.run(source, "-np", "2")
    assert "rank 1 failed first, with exit code 1" in done.stderr
    assert done.stderr.splitlines()[-1] == "[1] ValueError: cause"


@pytest.mark.parametrize("peer", ["PeerLostError", "ValueError"])
def test_cause_that_is_too_slow_to_end_is_found_by_its_traceback(launcher: Launcher, peer: str) -> None:
    # Rank 1 prints a traceback and goes on, so that tfdist ends it. It died of it only if rank 0 lost a peer;
    # otherwise it may have caught it.
    source = f"""
import os, sys, time
if os.environ["TFDIST_RANK"] == "1":
    import traceback
    try: raise KeyError("cause")
    except KeyError: traceback.print_exc()
    time.sleep(60)
time.sleep(0.6)
class {peer}(Exception): pass
raise {peer}("of rank 0")
"""
    done = launcher.run(source, "-np", "2")
    assert done.returncode == 1
    first, words = (1, "KeyError: 'cause'") if peer == "PeerLostError" else (0, f"{peer}: of rank 0")
    assert f"rank {first} failed first, with exit code 1" in done.stderr
    assert done.stderr.splitlines()[-1].endswith(words)


def test_rank_that_ignores_sigterm_is_killed_within_5_seconds(launcher: Launcher) -> None:
    source = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.environ["TFDIST_RANK"] == "0":
    time.sleep(0.3)
    print("failed at", time.monotonic())
    sys.exit(3)
time.sleep(60)
"""
    done = launcher.run(source, "-np", "2")
    assert time.monotonic() - float(done.stdout.split()[-1]) < 5
    assert done.returncode == 3


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_rank_ended_by_a_signal(launcher: Launcher, number: signal.Signals) -> None:
    source = f"""
import os, resource, time
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
if os.environ["TFDIST_RANK"] == "1":
    print("last words", flush=True)
    os.kill(os.getpid(), {int(number)})
time.sleep(60)
"""
    done = launcher.run(source, "-np", "2")
    assert done.returncode == 128 + number
    assert f"rank 1 failed first, with {number.name}, signal {int(number)}" in done.stderr


def test_rank_that_ends_well_does_not_end_the_others(launcher: Launcher) -> None:
    source = "import os, time; r = int(os.environ['TFDIST_RANK']); time.sleep(r * 0.4); print('end', r)"
    done = launcher.run(source, "-np", "2")
    assert done.returncode == 0
    assert "[1] end 1" in done.stdout


def test_program_that_cannot_be_started(launcher: Launcher) -> None:
    broken = launcher.folder / "broken"
    broken.write_text("#!/no/such/interpreter\n")
    broken.chmod(0o755)
    command = [sys.executable, "-m", "tfdist", "run", "-np", "2", str(broken)]
    done = subprocess.run(command, env=launcher.environ, capture_output=True, text=True, timeout=BOUND)
    assert done.returncode in (126, 127)
    assert "cannot start" in done.stderr


# Nothing is left


def test_children_of_ranks_end_with_the_run(launcher: Launcher) -> None:
    with launcher.started(FAMILY, "-np", "2") as process:
        pids = read_pids(process, 2)
        assert process.wait(BOUND) == 0
        assert_nothing_left(launcher, pids)


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGKILL, -signal.SIGKILL)],
)
def test_signal_to_the_launcher_ends_everything(launcher: Launcher, number: int, code: int) -> None:
    with launcher.started(FAMILY + "time.sleep(120)", "-np", "2") as process:
        pids = read_pids(process, 2)
        assert len(list(launcher.private.iterdir())) == 1
        process.send_signal(number)
        assert process.wait(BOUND) == code
        assert_nothing_left(launcher, pids)


def test_ranks_end_even_when_the_guardian_is_killed_too(launcher: Launcher) -> None:
    source = "import os, time; print('pid', os.getpid(), flush=True); time.sleep(120)"
    with launcher.started(source, "-np", "2") as process:
        assert process.stdout is not None
        pids = [int(process.stdout.readline().split()[-1]) for _ in range(2)]
        children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        guardians = set(map(int, children)) - set(pids)
        assert len(guardians) == 1
        os.kill(guardians.pop(), signal.SIGKILL)
        process.kill()
        assert wait_until(lambda: not any(map(is_running, pids)))


def test_kill_9_of_the_launcher_frees_ports(launcher: Launcher) -> None:
    source = """
import os, socket, time
server = socket.create_server(("127.0.0.1", 0))
print("port", server.getsockname()[1], flush=True)
time.sleep(120)
"""
    with launcher.started(source, "-np", "1") as process:
        assert process.stdout is not None
        port = int(process.stdout.readline().split()[-1])
        process.kill()
        process.wait()

        def is_free() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) != 0

        assert wait_until(is_free)


def test_control_c_in_a_terminal_ends_everything(launcher: Launcher) -> None:
    source = FAMILY + "print('ready', flush=True)\ntime.sleep(120)"
    code, shown = run_in_terminal(launcher, launcher.command(source, "-np", "2"), interrupt_at=2)
    assert code == 130
    assert b"ended by SIGINT" in shown
    words = shown.replace(b"\r", b"").split(b"\n")
    pids = [int(word) for line in words if b"pids" in line for word in line.split(b"pids")[1].split()]
    assert len(pids) == 6
    assert_nothing_left(launcher, pids)


def test_script_may_handle_the_interruption(launcher: Launcher) -> None:
    source = """
import sys, time
try:
    print("ready", flush=True)
    time.sleep(120)
except KeyboardInterrupt:
    print("saved", flush=True)
"""
    with launcher.started(source, "-np", "2") as process:
        assert process.stdout is not None
        for _ in range(2):
            assert "ready" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=BOUND)
        assert process.returncode == 130
        assert rest.count("saved") == 2


def test_reader_that_goes_away_ends_the_run(launcher: Launcher) -> None:
    source = "import time\nwhile True: print('x' * 100, flush=True); time.sleep(0.01)"
    with launcher.started(source, "-np", "2") as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert wait_until(lambda: process.poll() is not None, 10)
        assert_nothing_left(launcher, [])
