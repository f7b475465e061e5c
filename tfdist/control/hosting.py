"""Rank 0's part of the start: run the server, and let the others find it."""

from __future__ import annotations

import os
import secrets
import socket
import time
from pathlib import Path
from typing import Any

from tfdist.cluster import ClusterSpec
from tfdist.control.dialing import Rejected, Unreachable, knock
from tfdist.control.frames import Part
from tfdist.control.membership import Membership
from tfdist.control.rendezvous import (
    Address,
    NotThereYet,
    Rendezvous,
    choose_bind_host,
    derive_key,
    listen,
    publish,
    read,
    withdraw,
)
from tfdist.control.server import ControlServer
from tfdist.errors import LauncherError

_PROBE = 2.0
_LINGER = 3.0


class Host:
    """The server of this process and its entry in the rendezvous.

    Args:
        spec: place of this process, rank 0.
        rendezvous: where the others look.
        hello: header of this rank's hello message.
        secret: the launcher's secret.
        host: address to listen at, if not the default.
        timeout: bound of the start-up barrier in seconds.
        silence: after how many seconds without a byte an open connection counts as lost.
        grace: how long announcements may differ, in seconds.

    Attributes:
        address: where the server listens.

    Raises:
        LauncherError: the address or the folder can't be used, or another rank 0 is there.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        rendezvous: Rendezvous,
        *,
        hello: dict[str, Any],
        secret: bytes | None,
        host: str | None,
        timeout: float,
        silence: float,
        grace: float,
    ) -> None:
        self._spec = spec
        self._hello = hello
        self._file = rendezvous.file
        self._published = False
        bind_host = choose_bind_host(spec, rendezvous, host)
        shared_key = secret is not None or self._file is None
        key = derive_key(spec, secret) if shared_key else secrets.token_bytes(32)
        backlog = spec.size + 1024  # strangers must not fill it up: a rank's connection would wait a second
        listeners: list[socket.socket] = []
        try:
            listeners.append(listen(bind_host, 0, backlog=backlog))
            if rendezvous.host:
                listeners.append(listen(bind_host, rendezvous.port, backlog=backlog))
            port = listeners[0].getsockname()[1]
            self.address = Address(bind_host, port, key, spec.job, hello["instance"])
            if self._file is not None:
                self._publish(self._file, secret)
        except BaseException:
            for listener in listeners:
                listener.close()
            raise
        self._server = ControlServer(
            Membership(size=spec.size, job=spec.job, owner=hello["instance"], where=rendezvous.url),
            key=key,
            listener=listeners[0],
            bootstrap=listeners[1] if rendezvous.host else None,
            public_host=host or "",
            timeout=timeout,
            silence=silence,
            grace=grace,
        )
        self._server.start()

    def _publish(self, file: Path, secret: bytes | None) -> None:
        """Replaces what an earlier run left, but not what a living rank 0 of this job published."""
        address = self.address
        if secret is not None:  # the others have the secret; no need to write anything derived from it
            address = Address(address.host, address.port, b"", address.job, address.instance)
        if not publish(file, address, replace=False):
            self._look_for_rival(file, secret)
            publish(file, address, replace=True)
        self._published = True

    def _look_for_rival(self, file: Path, secret: bytes | None) -> None:
        try:
            found = read(file)
        except NotThereYet:
            return
        if found.job != self._spec.job:
            return
        key = derive_key(self._spec, secret) if secret is not None else found.key
        try:
            # A living server refuses a second rank 0, and ends its own start, for it can't know who is right.
            line, _ = knock(
                Address(found.host, found.port, key),
                hello=self._hello,
                payload=Part.of(b""),
                deadline=time.monotonic() + _PROBE,
            )
        except Rejected as rejected:
            raise rejected.error from None
        except Unreachable:
            return
        line.close()
        raise self._rival_error(file)

    def require_entry(self) -> None:
        """Checks during the start that nobody else has published as rank 0 since.

        Raises:
            LauncherError: somebody has.
        """
        if self._file is None:
            return
        try:
            found = read(self._file)
        except NotThereYet:
            return
        if found.instance != self.address.instance:
            raise self._rival_error(self._file)

    def _rival_error(self, file: Path) -> LauncherError:
        return LauncherError(
            f"Every rank must be one process: pid {os.getpid()} on host {socket.gethostname()} and another "
            f"process both claim rank 0 at {file}. Check that the launcher sets a different rank for each "
            "process, and that each run has its own rendezvous."
        )

    def close(self, *, dismiss: bool = False) -> None:
        """Serves on until the others said goodbye, for 3 s at most, or dismisses them; then removes the entry."""
        self._server.stop(0.0 if dismiss else _LINGER)
        if self._published and self._file is not None:
            withdraw(self._file, self.address.instance)
