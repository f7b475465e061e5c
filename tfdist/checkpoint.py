"""Files that are either as before or complete: written beside their place, then renamed into it.

Problem: most writers empty a file first and fill it afterwards. A process that is killed in between, a full disk or
a power cut leaves a part of the new file, and nothing of the old one.

Solution: write a temporary file in the same folder, flush it to the disk, rename it over the target, flush the
folder. A rename within a folder is atomic (POSIX), so a reader sees the old file or the new one, never a part.

A temporary file is called `.tfdist-<process>-<host>-<token>-<name of the target>`. One whose process has ended is
of no use to anybody, and the next write of the same target removes it.

Reference: Pillai et al. 2014, "All File Systems Are Not Created Equal", section 4: why flush before the rename.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import socket
import time
import zlib
from collections.abc import Iterator

_TEMPORARY = re.compile(r"\.tfdist-(?P<process>\d+)-(?P<host>[0-9a-f]{8})-[0-9a-f]{8}-(?P<name>.+)")
_FORGOTTEN = 86400.0
"""Seconds after which a temporary file of another host, whose processes cannot be asked for, counts as left."""

_writing: set[str] = set()


@contextlib.contextmanager
def atomically(path: str | os.PathLike[str], *, room: int = 0) -> Iterator[str]:
    """Gives a path to write to, whose file takes the place of `path` at the end, all at once.

    If the body raises, `path` stays as it was, and the temporary file is removed. Only the calling process takes
    part; several may write the same target at a time: each file is complete, the last one stays. Permissions of a
    file that is replaced are kept, and a symbolic link goes on pointing to its file.

    What cannot be renamed over is handed through, and is then as safe as its writer: a remote path (`gs://...`), a
    folder, a device. So is a path that was itself given by `atomically`.

    Args:
        path: the file to write; its folder must exist. The temporary path ends in the same name, so writers that
            look at the suffix see the same.
        room: bytes that must be free before anything is written; for writers that don't survive a full disk, as
            HDF5, whose file crashes the process when it is closed.

    Yields:
        The path to write to, where no file exists yet.

    Raises:
        PermissionError: the file is write-protected, or its folder is.
        FileNotFoundError: there is no such folder, or the body has written nothing.
        OSError: the disk is full, or has less than `room`, or fails.

    Example:
        >>> import pathlib, tempfile
        >>> from tfdist.checkpoint import atomically
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "notes.txt"
        >>> with atomically(file) as temporary:
        ...     _ = pathlib.Path(temporary).write_text("all of it")
        >>> file.read_text()
        'all of it'
    """
    place = os.fspath(path)
    cannot_be_renamed_over = "://" in place or (os.path.exists(place) and not os.path.isfile(place))
    if cannot_be_renamed_over or place in _writing:
        yield place
        return
    target = os.path.realpath(place)
    folder, name = os.path.split(target)
    _refuse_protected(target, folder)
    _remove_left_behind(folder, name)
    temporary = os.path.join(folder, f".tfdist-{os.getpid()}-{_this_host()}-{secrets.token_hex(4)}-{name}")
    _writing.add(temporary)
    try:
        if room:
            _require(room, temporary)
        yield temporary
        _flush(temporary)
        if os.path.exists(target):
            shutil.copymode(target, temporary)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    finally:
        _writing.discard(temporary)
    _flush(folder)


def _refuse_protected(target: str, folder: str) -> None:
    """A rename would replace a write-protected file; and without its folder, no rename is possible."""
    if os.path.exists(target) and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, "the file is write-protected", target)
    if os.path.isdir(folder) and not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(
            errno.EACCES,
            "a file is written by way of a temporary file beside it, so its folder must be writable, and is not",
            folder,
        )


def _require(room: int, path: str) -> None:
    """Allocates space and gives it back: unlike a look at what is free, that finds quotas and limits, too."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        os.posix_fallocate(descriptor, 0, room)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):  # else this file system cannot allocate
            said = f"{os.strerror(error.errno)}: about {room} bytes are needed"
            raise OSError(error.errno, said, path) from None
    finally:
        os.close(descriptor)
        os.unlink(path)


def _remove_left_behind(folder: str, name: str) -> None:
    for entry in os.listdir(folder):
        found = _TEMPORARY.fullmatch(entry)
        if found is None or found["name"] != name:
            continue
        path = os.path.join(folder, entry)
        with contextlib.suppress(FileNotFoundError):
            if _is_left_behind(path, int(found["process"]), found["host"]):
                os.unlink(path)


def _is_left_behind(path: str, process: int, host: str) -> bool:
    if host != _this_host():
        return time.time() - os.stat(path).st_mtime > _FORGOTTEN
    if process == os.getpid():  # in a container, the process before this one had the same number
        return path not in _writing
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def _this_host() -> str:
    return f"{zlib.crc32(socket.gethostname().encode()):08x}"


def _flush(path: str) -> None:
    """Waits until a file's contents, or a folder's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # the file system knows no flush of this kind, as some do for folders
            raise
    finally:
        os.close(descriptor)
