"""Where ranks find the control server.

`file:///path`: rank 0 lets the kernel choose a port (no race for a fixed one) and then publishes host, port
and a random key in that file, readable by its owner only; the others poll for it.
`tcp://host:port`: rank 0 listens there only to tell peers the port of the real server, and stops once all are
connected: under TF_CONFIG that port belongs to TensorFlow's own server.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hmac
import json
import os
import secrets
import socket
import stat
import urllib.parse
from pathlib import Path

from tfdist.cluster import ClusterSpec
from tfdist.errors import LauncherError

LOOPBACK = "127.0.0.1"


@dataclasses.dataclass(frozen=True)
class Address:
    """A TCP address and the key of the job that listens there; no key if the launcher gave a secret."""

    host: str
    port: int
    key: bytes = b""
    job: str = ""
    instance: str = ""


@dataclasses.dataclass(frozen=True)
class Rendezvous:
    """A parsed `ClusterSpec.rendezvous`: either `file` or `host` and `port` is set; neither at size 1."""

    url: str
    file: Path | None = None
    host: str = ""
    port: int = 0


class NotThereYet(Exception):
    """Nothing usable at the rendezvous at this moment; the text says what was found instead."""


def parse_rendezvous(spec: ClusterSpec) -> Rendezvous:
    """Raises `LauncherError` for anything but `file:///path` and `tcp://host:port`."""
    url = spec.rendezvous
    if not url and spec.size == 1:
        return Rendezvous("")
    rule = (
        f"rank {spec.rank}: the rendezvous must be file:///absolute/path or tcp://host:port, got {url!r}. "
        "Start the script with `tfdist run`, or set TFDIST_RENDEZVOUS."
    )
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise LauncherError(rule) from error
    if parts.scheme == "file" and not parts.netloc and parts.path.startswith("/"):
        return Rendezvous(url, file=Path(urllib.parse.unquote(parts.path)))
    if parts.scheme == "tcp" and parts.hostname and port:
        return Rendezvous(url, host=parts.hostname, port=port)
    raise LauncherError(rule)


def derive_key(spec: ClusterSpec, secret: bytes | None) -> bytes:
    """The job's key where no file carries one.

    From the launcher's secret when there is one. Without it, from the job's name: that keeps ranks of
    different jobs apart and strangers' accidental traffic out, but whoever knows or guesses the job's name
    can join.
    """
    return hmac.digest(secret or spec.job.encode() or b"tfdist", b"tfdist control channel", "sha256")


def choose_bind_host(spec: ClusterSpec, rendezvous: Rendezvous, host: str | None) -> str:
    """Address on which rank 0 listens: loopback for a one-host job, otherwise one that peers can reach."""
    if host:
        if rendezvous.file is not None and host in ("0.0.0.0", "::", "*"):
            raise LauncherError(
                f"TFDIST_HOST must be an address that the other hosts can connect to, got {host!r}: with a "
                "file rendezvous they read it from the file."
            )
        return host
    if spec.local_size == spec.size:
        return LOOPBACK
    if rendezvous.host:
        address = _resolve(rendezvous.host)
        if address and not _is_loopback(address):
            return address
    address = _resolve(socket.gethostname())
    if address and not _is_loopback(address):
        return address
    # Many systems map their own name to 127.0.1.1. Connecting a datagram socket sends nothing; it only asks
    # the kernel which address it would use towards other networks (192.0.2.1 is reserved for documentation).
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        address = str(probe.getsockname()[0])
        if not _is_loopback(address):
            return address
    raise LauncherError(
        f"rank {spec.rank}: the job spans {spec.cross_size} hosts, but no address of host "
        f"{socket.gethostname()} other than loopback was found. Set TFDIST_HOST to the address at which the "
        "other hosts reach rank 0."
    )


def _resolve(name: str) -> str:
    with contextlib.suppress(OSError):
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    return ""


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def listen(host: str, port: int, *, backlog: int) -> socket.socket:
    """A listening socket; `port` 0 lets the kernel choose."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise LauncherError(f"rank 0: cannot listen at {host}: {error}. Set TFDIST_HOST.") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(backlog)
    except OSError as error:
        listener.close()
        fix = "Set TFDIST_HOST to an address of rank 0's host."
        if error.errno == errno.EADDRINUSE:
            fix = (
                "Another program, or another process that claims rank 0, listens there: end it or choose "
                "another port."
            )
        elif error.errno == errno.EADDRNOTAVAIL:
            fix = "That is no address of this host: start rank 0 on the host named there, or set TFDIST_HOST."
        raise LauncherError(f"rank 0: cannot listen at {host}:{port}: {error.strerror}. {fix}") from error
    listener.setblocking(False)
    return listener


def publish(path: Path, address: Address, *, replace: bool) -> bool:
    """Writes the rendezvous file atomically, mode 0600, its folder 0700.

    Returns:
        False if a file is there already and `replace` is False.

    Raises:
        LauncherError: the folder belongs to someone else or others may write in it.
    """
    folder = path.parent
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise LauncherError(
            f"rank 0: the folder of the rendezvous file must belong to user {os.geteuid()} and be writable "
            f"by nobody else; {folder} belongs to user {found.st_uid} and has mode "
            f"{stat.S_IMODE(found.st_mode):04o}. Choose a folder of your own with mode 0700."
        )
    content = {
        "host": address.host,
        "port": address.port,
        "key": address.key.hex(),
        "job": address.job,
        "instance": address.instance,
    }
    draft = folder / f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}"
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump(content, file)
        if replace:
            os.replace(draft, path)
        else:
            os.link(draft, path)  # unlike a rename it fails when somebody was first
    except FileExistsError:
        return False
    finally:
        with contextlib.suppress(FileNotFoundError):
            draft.unlink()
    return True


def read(path: Path) -> Address:
    """What rank 0 published.

    Raises:
        NotThereYet: there is no file, it is incomplete, or somebody else could have written it.
    """
    try:
        with open(path) as file:
            found = os.fstat(file.fileno())
            if found.st_uid != os.geteuid() or found.st_mode & 0o077:
                raise NotThereYet(
                    f"{path} is ignored: it belongs to user {found.st_uid} and has mode "
                    f"{stat.S_IMODE(found.st_mode):04o}, only an own file of mode 0600 is trusted"
                )
            content = json.load(file)
        return Address(
            host=str(content["host"]),
            port=int(content["port"]),
            key=bytes.fromhex(content["key"]),
            job=str(content["job"]),
            instance=str(content["instance"]),
        )
    except FileNotFoundError as error:
        raise NotThereYet(f"{path} does not exist") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NotThereYet(f"{path} cannot be read: {error}") from error


def withdraw(path: Path, instance: str) -> None:
    """Removes the rendezvous file if it is still the one that `instance` published."""
    with contextlib.suppress(NotThereYet, OSError):
        if read(path).instance == instance:
            path.unlink()
