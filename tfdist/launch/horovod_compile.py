"""Compiles Horovod's wheel from PyPI's source distribution.

Problem: Horovod 0.28.1 is the last release, and of its sources one file, `horovod/tensorflow/xla_mpi_ops.cc`,
doesn't compile with TensorFlow 2.14 and later: it includes XLA headers that moved or are no longer shipped.

Solution: replace that one translation unit. It only adds XLA custom calls, which tfdist keeps out of
compiled functions anyway; everything else compiles unchanged. In a CPU build it stays empty. In a GPU build
it defines the one function that Horovod's other sources declare and expect TensorFlow to export, which
current versions no longer do: the CUDA stream behind a TensorFlow stream, from TensorFlow's public accessor.
Without it the library links, but doesn't load. The build also leaves out what nobody uses: a second Gloo, for
TensorFlows before C++17, and debugging information (the wheel then has 1 MB instead of 16). setuptools, wheel,
packaging and, where missing, cmake and ninja come from PyPI into the cache, never into the user's environment.
Compiler output goes to a log; the terminal sees progress, and on failure the first real error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tfdist.errors import BackendUnavailableError
from tfdist.launch.horovod_toolchain import Cuda, Machine, Mpi, Nccl, usable_cmake
from tfdist.launch.horovod_wheels import WheelCache, sha256_of

HOROVOD_VERSION = "0.28.1"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
REPLACED_SOURCE = "horovod/tensorflow/xla_mpi_ops.cc"

_REPLACEMENT = """\
// Replaced by tfdist: the original needs XLA headers that TensorFlow no longer ships.
#if HAVE_CUDA
#include <cuda_runtime.h>

#include "tensorflow/compiler/xla/stream_executor/stream.h"

namespace stream_executor {
namespace gpu {

cudaStream_t AsGpuStreamValue(Stream* stream) {
  return static_cast<cudaStream_t>(stream->platform_specific_handle().stream);
}

}  // namespace gpu
}  // namespace stream_executor
#endif  // HAVE_CUDA
"""

# In CMakeLists.txt: what is replaced by what.
_TRIMMED = {
    "add_subdirectory(third_party/gloo)": "add_subdirectory(third_party/gloo EXCLUDE_FROM_ALL)",
    'string(REPLACE "-O2" "-O3"': 'string(REPLACE "-O2 -g" "-O3"',
}

_BUILD_REQUIREMENTS = ("setuptools>=70.1,<86", "wheel>=0.43,<1", "packaging>=23")
_CMAKE_REQUIREMENT = "cmake>=3.26,<4"
_NINJA_REQUIREMENT = "ninja>=1.11,<2"

# setuptools' own build hook, as pip calls it; -q because its verbose mode passes make's options to ninja.
_BUILD_WHEEL = (
    "import sys; from setuptools.build_meta import __legacy__ as backend; "
    "print(backend.build_wheel(sys.argv.pop(), {'--global-option': ['-q']}))"
)


@dataclasses.dataclass(frozen=True)
class BuildTools:
    """Where the tools of a build are.

    Attributes:
        packages: folder for PYTHONPATH with setuptools, wheel and packaging.
        cmake: path of CMake.
        ninja: path of ninja, or None where `make` is installed.
    """

    packages: Path
    cmake: str
    ninja: str | None


def build_environment(
    environ: Mapping[str, str],
    *,
    tools: BuildTools,
    compiler: str,
    jobs: int,
    mpi: Mpi | None = None,
    nccl: Nccl | None = None,
    nccl_home: Path | None = None,
    cuda: Cuda | None = None,
    capabilities: Sequence[int] = (),
) -> dict[str, str]:
    """Environment variables for Horovod's build; settings of an earlier build don't leak into it.

    Args:
        environ: the user's environment; `HOROVOD_BUILD_ARCH_FLAGS` and compiler flags are honoured.
        tools: from `prepare_tools`.
        compiler: C++ compiler.
        jobs: compilers at once.
        mpi: build with this MPI; without it MPI stays out, even if CMake could find one.
        nccl: build with this NCCL, then `nccl_home`, `cuda` and `capabilities` are needed too.
        nccl_home: folder with `include` and `lib/libnccl.so` for the linker.
        cuda: CUDA toolkit.
        capabilities: device generations to compile for, such as `(80, 90)`.

    Returns:
        The complete environment.
    """
    kept = ("HOROVOD_BUILD_ARCH_FLAGS",)
    result = {k: v for k, v in environ.items() if not k.startswith("HOROVOD_") or k in kept}
    path = [str(Path(tools.ninja).parent)] if tools.ninja else []
    result.update(
        HOROVOD_WITH_TENSORFLOW="1",
        HOROVOD_WITHOUT_PYTORCH="1",
        HOROVOD_WITHOUT_MXNET="1",
        HOROVOD_WITH_GLOO="1",
        HOROVOD_WITHOUT_NVTX="1",
        HOROVOD_CMAKE=tools.cmake,
        CXX=compiler,
        # Horovod adds -j8 unless MAKEFLAGS is set; ninja reads the other one.
        MAKEFLAGS=f"-j{jobs}",
        CMAKE_BUILD_PARALLEL_LEVEL=str(jobs),
        VERBOSE="1",
        PYTHONPATH=str(tools.packages),
        PYTHONUNBUFFERED="1",
        TF_CPP_MIN_LOG_LEVEL="3",
        LC_ALL="C",
    )
    if tools.ninja:
        result["CMAKE_GENERATOR"] = "Ninja"
    else:
        result["CMAKE_GENERATOR"] = "Unix Makefiles"
    if mpi:
        path.append(str(Path(mpi.mpicxx).parent))
        result["HOROVOD_WITH_MPI"] = "1"
    else:
        result["HOROVOD_WITHOUT_MPI"] = "1"
    if nccl and cuda:
        code_list = ",".join(map(str, capabilities))
        result.update(
            HOROVOD_GPU="CUDA",
            HOROVOD_GPU_OPERATIONS="NCCL",
            HOROVOD_CUDA_HOME=str(cuda.home),
            HOROVOD_NCCL_HOME=str(nccl_home),
            HOROVOD_NCCL_LINK="SHARED",
            HOROVOD_BUILD_CUDA_CC_LIST=code_list,
            CUDAARCHS=code_list.replace(",", ";"),
        )
        # Found at run time without LD_LIBRARY_PATH, whatever becomes of the links in the build folder.
        flags = f"{environ.get('LDFLAGS', '')} -Wl,-rpath,{nccl.library.parent}"
        result["LDFLAGS"] = flags.strip()
    result["PATH"] = os.pathsep.join([*path, environ.get("PATH", os.defpath)])
    return result


def prepare_tools(cache: WheelCache, machine: Machine, *, tell: Callable[[str], None]) -> BuildTools:
    """Installs build tools into the cache, once for each Python, and says where they are.

    Raises:
        BackendUnavailableError: pip could not bring them.
    """
    cmake = usable_cmake(machine)
    make = machine.which("make")
    requirements = list(_BUILD_REQUIREMENTS)
    if cmake is None:
        requirements.append(_CMAKE_REQUIREMENT)
    ninja = machine.which("ninja")
    if make is None and ninja is None:
        requirements.append(_NINJA_REQUIREMENT)
    names = "-".join(re.split(r"[<>=]", requirement)[0] for requirement in requirements)
    folder = cache.tools / f"{sys.implementation.cache_tag}-{names}"
    if not folder.is_dir():
        tell(f"fetching build tools: {', '.join(requirements)}")
        incoming = folder.with_name(f".{folder.name}-{os.getpid()}")
        shutil.rmtree(incoming, ignore_errors=True)
        _run_pip(["install", "--quiet", "--target", str(incoming), *requirements], what="build tools")
        incoming.rename(folder)
    if cmake is None:
        cmake = str(folder / "cmake" / "data" / "bin" / "cmake")
    if make is None and ninja is None:
        ninja = shutil.which(
            "ninja", path=os.pathsep.join(map(str, (folder / "bin", folder / "ninja/data/bin")))
        )
        if ninja is None:
            raise BackendUnavailableError(
                f"Neither make nor ninja is here, and PyPI's ninja has no program in {folder}. "
                "Install make (apt-get install make)."
            )
    return BuildTools(folder, cmake, None if make else ninja)


def fetch_source(cache: WheelCache, tools: BuildTools, *, tell: Callable[[str], None]) -> Path:
    """Horovod's source distribution from the cache, else from the user's package index; checked by hash.

    Raises:
        BackendUnavailableError: it can't be fetched, or is not the file that was released.
    """
    name = f"horovod-{HOROVOD_VERSION}.tar.gz"
    path = cache.sources / name
    if path.is_file():
        if sha256_of(path) == SDIST_SHA256:
            return path
        tell(f"{path} is damaged; fetching it again")
        path.unlink()
    tell(f"fetching {name}")
    incoming = cache.sources / f".incoming-{os.getpid()}"
    shutil.rmtree(incoming, ignore_errors=True)
    incoming.mkdir(parents=True)
    # A hash in a requirements file makes pip check the file before it runs anything in it.
    requirement = incoming / "requirements.txt"
    requirement.write_text(f"horovod=={HOROVOD_VERSION} --hash=sha256:{SDIST_SHA256}\n")
    try:
        _run_pip(
            [
                *("download", "--quiet", "--no-deps", "--no-build-isolation", "--no-binary", "horovod"),
                *("--dest", str(incoming), "--requirement", str(requirement)),
            ],
            what=f"Horovod's source; without network put {name} into {cache.sources}",
            environment={"PYTHONPATH": str(tools.packages), "HOROVOD_WITHOUT_PYTORCH": "1"},
        )
        (incoming / name).rename(path)
    finally:
        shutil.rmtree(incoming, ignore_errors=True)
    return path


def unpack_source(archive: Path, folder: Path) -> Path:
    """Unpacks the source into `folder`, replaces the one file that can't compile, and trims the build.

    Returns:
        Root of the source.
    """
    with tarfile.open(archive) as tar:
        if hasattr(tarfile, "data_filter"):
            tar.extractall(folder, filter="data")
        else:  # Python 3.10 before 3.10.12; the archive's hash is known
            tar.extractall(folder)
    root = folder / f"horovod-{HOROVOD_VERSION}"
    (root / REPLACED_SOURCE).write_text(_REPLACEMENT)
    build = root / "CMakeLists.txt"
    text = build.read_text()
    for wordy, trimmed in _TRIMMED.items():
        text = text.replace(wordy, trimmed)
    build.write_text(text)
    return root


def link_nccl(nccl: Nccl, folder: Path) -> Path:
    """A folder laid out as Horovod's scripts want NCCL; PyPI's package lacks the link `libnccl.so`."""
    (folder / "lib").mkdir(parents=True)
    (folder / "include").symlink_to(nccl.include, target_is_directory=True)
    (folder / "lib" / "libnccl.so").symlink_to(nccl.library)
    return folder


def compile_wheel(
    source: Path,
    destination: Path,
    *,
    environment: Mapping[str, str],
    log: Path,
    timeout: float,
    tell: Callable[[str], None],
    verbose: bool = False,
) -> Path:
    """Runs Horovod's build; its output goes to `log`, progress to `tell`.

    Args:
        source: unpacked source.
        destination: folder for the wheel.
        environment: from `build_environment`.
        log: file for the complete output.
        timeout: bound in seconds.
        tell: receives a line now and then.
        verbose: passes every line of output on.

    Returns:
        Path of the wheel.

    Raises:
        BackendUnavailableError: it failed; the message shows the first real error and the log's path.
    """
    destination.mkdir(parents=True, exist_ok=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-c", _BUILD_WHEEL, str(destination)]
    progress = Progress(tell)
    process = subprocess.Popen(
        command,
        cwd=source,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    late = threading.Event()

    def end_late_build() -> None:
        late.set()
        _kill_group(process)

    timer = threading.Timer(timeout, end_late_build)
    timer.start()
    try:
        assert process.stdout is not None
        with log.open("w", encoding="utf-8") as file:
            for line in process.stdout:
                file.write(line)
                file.flush()
                if verbose:
                    tell(line.rstrip("\n"))
                else:
                    progress.read(line)
        code = process.wait()
    finally:
        timer.cancel()
        _kill_group(process)
        process.wait()
    if late.is_set():
        raise BackendUnavailableError(
            f"Building Horovod took more than {timeout:g} s and was ended. Give it longer with --timeout, or "
            f"more parallel compilers with --jobs. Full log: {log}"
        )
    wheels = sorted(destination.glob("horovod-*.whl"))
    if code != 0 or not wheels:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        raise BackendUnavailableError(describe_failure(lines, code=code, log=log))
    return wheels[0]


def _kill_group(process: subprocess.Popen[str]) -> None:
    """Ends the build's whole process group; compilers outlive the Python that started them."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


class Progress:
    """Turns compiler output into a line now and then, so that nobody thinks the build hangs.

    Args:
        tell: receives the lines.
        clock: seconds; a test gives its own.
        every: seconds after which a line is due.
    """

    def __init__(
        self, tell: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic, every: float = 15.0
    ) -> None:
        self._tell = tell
        self._clock = clock
        self._every = every
        self._start = self._last = clock()
        self._told = -1

    def read(self, line: str) -> None:
        """Takes a line of output; make counts in percent, ninja in steps."""
        percent = re.match(r"\[\s*(\d+)%\]", line)
        step = re.match(r"\[(\d+)/(\d+)\]", line)
        if percent:
            done = int(percent.group(1))
        elif step:
            done = 100 * int(step.group(1)) // max(1, int(step.group(2)))
        else:
            return
        now = self._clock()
        if done > self._told and (done >= self._told + 20 or now - self._last >= self._every):
            minutes, seconds = divmod(int(now - self._start), 60)
            self._tell(f"compiling: {done}% after {minutes}:{seconds:02}")
            self._told, self._last = done, now


# In order of what a reader should see: the earliest line that matches any of them.
_ERROR = re.compile(
    r"(:\s(fatal )?error: |\(\d+\): (catastrophic )?error|error: |undefined reference to|cannot find -l"
    r"|^CMake Error|No space left on device|Killed signal terminated|^\w*Error: |^nvcc fatal)"
)
# Repetitions of a failure by the tools above the compiler; they are never the first cause.
_ECHO = re.compile(r"^(g?make|ninja)\b|subprocess\.CalledProcessError|^collect2: error|^error: subprocess")
_HINTS = (
    (r"Killed signal terminated|out of memory|virtual memory exhausted", "memory ran out: use --jobs 1"),
    (r"No space left on device", "the disk is full: free some or choose another folder with --cache"),
    (
        r"unsupported GNU version|unsupported Microsoft|nvcc fatal|CUDA.*is not able to compile|CMAKE_CUDA",
        "the CUDA compiler doesn't work with this C++ compiler: take its folder off PATH for a build without "
        "nccl, or set CXX to a version it supports",
    ),
)


def first_error(lines: Sequence[str], *, before: int = 3, after: int = 6) -> list[str]:
    """The first real compiler, linker or CMake error of a log, with a few lines around it.

    Args:
        lines: the whole log.
        before: lines to show before it (where the compiler came from).
        after: lines to show after it (source line and caret).

    Returns:
        The lines, each cut at 300 characters; the log's last lines when nothing looks like an error.
    """
    for index, line in enumerate(lines):
        if _ERROR.search(line) and not _ECHO.search(line) and not _is_command(line):
            around = lines[max(0, index - before) : index + 1 + after]
            telling = [shown[:300] for shown in around if not _is_command(shown) and not _ECHO.search(shown)]
            return list(dict.fromkeys(telling))
    return [line[:300] for line in lines[-15:]]


def _is_command(line: str) -> bool:
    """Whether a line is the compiler's command, which verbose builds print and which can contain anything."""
    return len(line) > 300 and (" -o " in line or " -c " in line)


def describe_failure(lines: Sequence[str], *, code: int, log: Path) -> str:
    """Message for a failed build: what went wrong first, a hint where the cause is known, the log's path."""
    shown = "\n".join(f"    {line}" for line in first_error(lines))
    hints = [hint for pattern, hint in _HINTS if re.search(pattern, shown)]
    hint = f"\n  likely cause: {hints[0]}" if hints else ""
    return f"Horovod did not compile (exit code {code}). First error:\n{shown}{hint}\n  full log: {log}"


def _run_pip(arguments: Sequence[str], *, what: str, environment: Mapping[str, str] | None = None) -> None:
    """Runs this interpreter's pip, which honours the user's index, proxy and certificates."""
    command = [sys.executable, "-m", "pip", *arguments]
    # --target and a user install exclude each other.
    full = {**os.environ, "PIP_USER": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1", **(environment or {})}
    try:
        result = subprocess.run(
            command,
            env=full,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=900,
        )
    except subprocess.TimeoutExpired:
        raise BackendUnavailableError(
            f"pip did not bring {what} within 900 s: is the package index reachable?"
        ) from None
    if result.returncode:
        lines = [line for line in result.stdout.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR") or "error:" in line] or lines[-5:]
        text = "\n".join(f"    {line[:300]}" for line in errors[:8])
        raise BackendUnavailableError(f"pip could not bring {what}:\n{text}\n  command: {' '.join(command)}")
