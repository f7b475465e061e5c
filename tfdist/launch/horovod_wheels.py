"""A cache of Horovod wheels, keyed by everything a wheel depends on.

Problem: a Horovod wheel fits exactly one combination of TensorFlow build, Python, platform, MPI and NCCL, and
takes minutes to build. A build may be killed at any moment, and two may run at once.

Solution: the key names the combination; a wheel enters the cache by one rename, complete or not at all; a
file lock, which the kernel releases when its holder dies, admits one builder.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import fcntl
import hashlib
import importlib.metadata
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tfdist.errors import BackendUnavailableError

# Raise it when the way of building changes, so that older wheels are not taken for new ones.
RECIPE = 1


@dataclasses.dataclass(frozen=True)
class Ingredients:
    """Everything that decides whether a wheel fits.

    Attributes:
        horovod: version of Horovod.
        tensorflow: version of TensorFlow.
        tensorflow_build: distribution and fingerprint of its libraries, see `tensorflow_build`.
        python: tag of interpreter and ABI, such as `cp311` or `cp313t`.
        platform: operating system and machine, such as `linux-x86_64`.
        features: sorted names, such as `("gloo", "mpi")`.
        mpi: identity of the MPI, empty without.
        nccl: identity of NCCL, CUDA and device list, empty without.
    """

    horovod: str
    tensorflow: str
    tensorflow_build: str
    python: str
    platform: str
    features: tuple[str, ...]
    mpi: str = ""
    nccl: str = ""

    def key(self) -> str:
        """Name of the wheel's folder: readable parts, then a digest of all of them."""
        digest = hashlib.sha256(repr((RECIPE, dataclasses.astuple(self))).encode()).hexdigest()[:12]
        readable = (
            f"horovod-{self.horovod}-tf{self.tensorflow}-{self.python}-{'.'.join(self.features)}-{digest}"
        )
        return re.sub(r"[^\w.+-]", "_", readable)


def tensorflow_build(distribution: str) -> str:
    """Fingerprint of an installed TensorFlow's libraries, from its RECORD: without hashing gigabytes.

    Builds of one version from different distributions, or of a local build number, differ in it.
    """
    installed = importlib.metadata.distribution(distribution)
    record = installed.read_text("RECORD") or ""
    libraries = sorted(
        (row[0], row[1])
        for row in csv.reader(record.splitlines())
        if len(row) >= 2
        and re.search(r"libtensorflow_(framework|cc)\.|_pywrap_tensorflow_internal\.", row[0])
    )
    if not libraries:
        # conda and system packages keep no RECORD; size and date of the library still tell builds apart.
        for path in sorted(Path(str(installed.locate_file("tensorflow"))).glob("libtensorflow_*")):
            status = path.stat()
            libraries.append((path.name, f"{status.st_size} {int(status.st_mtime)}"))
    return f"{distribution} {hashlib.sha256(repr(libraries).encode()).hexdigest()[:16]}"


class WheelCache:
    """Folder that holds Horovod's source, build tools and finished wheels.

    Args:
        root: the folder; made when first needed.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def sources(self) -> Path:
        return self.root / "sources"

    @property
    def tools(self) -> Path:
        return self.root / "tools"

    def find(self, key: str) -> Path | None:
        """The finished wheel for a key, or None."""
        return next(iter(sorted((self.root / "wheels" / key).glob("*.whl"))), None)

    def store(self, key: str, wheel: Path) -> Path:
        """Moves a finished wheel into the cache, replacing one of the same key; returns its new path."""
        wheels = self.root / "wheels"
        wheels.mkdir(parents=True, exist_ok=True)
        incoming = wheels / f".incoming-{key}-{os.getpid()}"
        shutil.rmtree(incoming, ignore_errors=True)
        incoming.mkdir()
        shutil.copyfile(wheel, incoming / wheel.name)
        with (incoming / wheel.name).open("rb") as file:
            os.fsync(file.fileno())
        # A folder can't be renamed over a full one: the old wheel leaves by a rename, too.
        target = wheels / key
        if target.exists():
            outgoing = wheels / f".outgoing-{key}-{os.getpid()}"
            target.rename(outgoing)
            shutil.rmtree(outgoing, ignore_errors=True)
        incoming.rename(target)
        return target / wheel.name

    def fresh_build_folder(self, key: str) -> Path:
        """An empty folder to build in; removes what killed builds left. Call while holding the lock."""
        builds = self.root / "builds"
        shutil.rmtree(builds, ignore_errors=True)
        for leftover in (self.root / "wheels").glob(".*-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        folder = builds / f"{key}-{os.getpid()}"
        folder.mkdir(parents=True)
        return folder

    @contextlib.contextmanager
    def lock(self, *, timeout: float, tell: Callable[[str], None]) -> Iterator[None]:
        """Admits one builder at a time to this cache.

        Args:
            timeout: seconds to wait for another builder.
            tell: receives a line when it has to wait.

        Raises:
            BackendUnavailableError: another builder held it for longer.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        path = self.root / "lock"
        deadline = time.monotonic() + timeout
        told = False
        with path.open("a+") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    file.seek(0)
                    holder = file.read().strip() or "unknown"
                    if not told:
                        tell(f"waiting for another build in {self.root} (process {holder})")
                        told = True
                    if time.monotonic() > deadline:
                        raise BackendUnavailableError(
                            f"One build at a time may use the cache {self.root}; process {holder} held it "
                            f"for more than {timeout:g} s. End that process, or choose another folder with "
                            "--cache."
                        ) from None
                    time.sleep(0.2)
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield


def default_cache() -> Path:
    """`$XDG_CACHE_HOME/tfdist`, by default `~/.cache/tfdist`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "tfdist"


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
